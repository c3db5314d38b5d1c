"""The position-wise feed-forward network."""
