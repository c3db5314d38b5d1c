"""Layers that work on each position alone. Each kind is one file."""

from .channel_mix import RWKV7ChannelMix
from .mlp import MLP
from .moe import MoE

FFNS = {
    "mlp": MLP, "moe": MoE,
    "rwkv7_ffn": RWKV7ChannelMix,
}
