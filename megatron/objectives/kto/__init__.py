"""Rated answers: KTO."""
