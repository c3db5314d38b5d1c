"""Adam-mini."""
