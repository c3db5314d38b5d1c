"""Scaling laws of a suite's runs: how the loss falls with parameters and tokens, and what a budget is best spent on."""
