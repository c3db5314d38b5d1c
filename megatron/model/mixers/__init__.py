"""Layers that mix information between positions. Each kind is one file."""

from .attention import Attention
from .cca import CCA
from .gated_delta import GatedDelta
from .mamba import Mamba
from .mamba2 import Mamba2
from .rwkv7 import RWKV7

MIXERS = {
    "attention": Attention, "mamba": Mamba, "mamba2": Mamba2, "rwkv7": RWKV7, "gated_delta": GatedDelta, "cca": CCA}
