"""A feature: the largest loss of a label in each step."""
