"""Sparse training: only the kept elements of pruned matrices have gradients, optimizer states and messages."""
