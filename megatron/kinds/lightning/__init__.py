"""Linear attention with a fixed decay per head and layer."""
