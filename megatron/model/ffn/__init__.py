"""Layers that work on each position alone. Each kind is one file."""

from .channel_mix import RWKV4ChannelMix, RWKV5ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix
from .mlp import MLP
from .moe import MoE

FFNS = {
    "mlp": MLP,
    "moe": MoE,
    "rwkv4_ffn": RWKV4ChannelMix,
    "rwkv5_ffn": RWKV5ChannelMix,
    "rwkv6_ffn": RWKV6ChannelMix,
    "rwkv7_ffn": RWKV7ChannelMix,
}
