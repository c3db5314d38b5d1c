"""Objectives of training: which labels count, and the cost of each. One folder per objective."""
