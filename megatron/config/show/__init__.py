"""Explaining and comparing configurations, and the generated reference."""
