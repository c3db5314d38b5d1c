"""Losses of policy gradients: texts that the model wrote, and what each was worth."""
