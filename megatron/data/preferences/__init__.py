"""Preference pairs and rated answers."""
