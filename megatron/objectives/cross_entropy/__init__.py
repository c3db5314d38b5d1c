"""Next-token prediction."""
