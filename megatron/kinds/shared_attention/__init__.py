"""Attention and an MLP whose weights several layers share, next to a mixer."""
