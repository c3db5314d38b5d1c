"""Runs that are killed and damaged on purpose, and compared with one that was left alone."""
