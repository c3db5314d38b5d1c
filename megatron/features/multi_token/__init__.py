"""Losses of modules that predict further tokens."""
