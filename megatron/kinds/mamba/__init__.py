"""Mamba and Mamba-2."""
