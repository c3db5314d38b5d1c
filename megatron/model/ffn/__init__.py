"""Layers that work on each position alone. Each kind is one file."""

from .mlp import MLP

FFNS = {"mlp": MLP}
