"""Retention: attention whose weights decay with distance and are not normalised."""
