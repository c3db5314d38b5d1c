"""What features say about themselves to a configuration."""
