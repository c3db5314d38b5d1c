"""Detects ranks that hang, and names the cause."""
