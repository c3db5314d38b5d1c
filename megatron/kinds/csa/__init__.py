"""Attention to a window and to compressed entries of all earlier tokens (DeepSeek-V4)."""
