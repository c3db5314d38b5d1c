"""Arithmetic on options that other rooms share. No torch."""
