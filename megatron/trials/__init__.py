"""Runs that are killed and damaged on purpose, and compared with an undisturbed one."""
