"""Explaining and comparing configurations; the generated reference."""
