"""Lion."""
