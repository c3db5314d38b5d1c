"""A reward model: one number for an answer."""
