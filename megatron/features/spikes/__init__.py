"""Losses and gradients that jump: updates that are skipped, clipped, repeated or rolled back."""
