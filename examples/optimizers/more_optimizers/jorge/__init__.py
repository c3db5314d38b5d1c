"""Jorge."""
