"""Attention and an MLP whose weights several layers share, beside a mixer."""
