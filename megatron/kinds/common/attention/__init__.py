"""Attention over documents, windows, caches and context parallel ranks."""
