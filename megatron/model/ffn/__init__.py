"""Layers that work on each position alone. Each kind is one file."""

from .mlp import MLP
from .moe import MoE

FFNS = {"mlp": MLP, "moe": MoE}
