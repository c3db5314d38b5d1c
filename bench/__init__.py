"""Measurements of speed, memory and messages. `python -m bench` lists them. docs/performance.md has the results."""
