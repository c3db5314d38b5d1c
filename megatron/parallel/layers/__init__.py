"""Sharded layers, and the collectives that autograd sees."""
