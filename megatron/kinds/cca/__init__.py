"""Compressed convolutional attention."""
