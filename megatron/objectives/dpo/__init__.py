"""Preferences between two answers: DPO and its variants."""
