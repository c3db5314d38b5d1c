"""Saving checkpoints: when, where to, and in which order files become valid."""
