"""Descriptions of features and objectives for a configuration, without torch."""
