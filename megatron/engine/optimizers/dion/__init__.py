"""Dion."""
