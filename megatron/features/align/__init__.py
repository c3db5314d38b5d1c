"""Reinforcement learning: texts that the model writes, rewards that judge them, and steps on both."""
