"""Scans with states, convolutions, decays."""
