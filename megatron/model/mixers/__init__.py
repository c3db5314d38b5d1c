"""Layers that mix information between positions. Each kind is one file.

Those beside a mixer (`mamba2+shared_attention`) are added to the mixer's input.
"""

from .attention import Attention
from .cca import CCA
from .gated_delta import GatedDelta
from .mamba import Mamba
from .mamba2 import Mamba2
from .rwkv4 import RWKV4
from .rwkv5 import RWKV5
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7
from .shared_attention import SharedAttention

MIXERS = {
    "attention": Attention,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "gated_delta": GatedDelta,
    "cca": CCA,
    "rwkv4": RWKV4,
    "rwkv5": RWKV5,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
}
BESIDES = {"shared_attention": SharedAttention}
