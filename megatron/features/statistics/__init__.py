"""Norms of weights, gradients and updates by layer, and the entropy of attention."""
