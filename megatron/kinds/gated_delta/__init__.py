"""Gated delta networks."""
