"""Broken configurations by concern: what stands in a.yml, and what the message must say."""

from tests.config.broken.async_tensor import ASYNC_TENSOR
from tests.config.broken.batches import BATCHES, WARNED_BATCHES
from tests.config.broken.case import BASE, Case
from tests.config.broken.cuda_graphs import CUDA_GRAPHS
from tests.config.broken.data import DATA
from tests.config.broken.deepspeed import COMMUNICATION, DEEPSPEED, ZERO
from tests.config.broken.fused_attention import FUSED_ATTENTION, WARNED_FUSED_ATTENTION
from tests.config.broken.keys import KEYS, RANGES, TYPES, YAML
from tests.config.broken.layout import LAYOUT
from tests.config.broken.model import MODEL
from tests.config.broken.moe import MOE, WARNED_MOE
from tests.config.broken.output import LAUNCH, OUTPUT
from tests.config.broken.pairs import PAIRS, WARNED_PAIRS
from tests.config.broken.recipe import RECIPE, SCHEDULE
from tests.config.broken.rwkv import RWKV
from tests.config.broken.sequences import SEQUENCES
from tests.config.broken.stages import STAGES, WARNED_STAGES
from tests.config.broken.state_space import STATE_SPACE
from tests.config.broken.streams import STREAMS
from tests.config.broken.warned import WARNED as WARNED_ELSEWHERE

BROKEN = [
    *KEYS,
    *TYPES,
    *RANGES,
    *YAML,
    *MODEL,
    *RWKV,
    *STATE_SPACE,
    *LAYOUT,
    *ZERO,
    *COMMUNICATION,
    *RECIPE,
    *BATCHES,
    *FUSED_ATTENTION,
    *CUDA_GRAPHS,
    *ASYNC_TENSOR,
    *SCHEDULE,
    *DATA,
    *OUTPUT,
    *LAUNCH,
    *DEEPSPEED,
    *MOE,
    *STAGES,
    *SEQUENCES,
    *PAIRS,
    *STREAMS,
]
WARNED = [*WARNED_ELSEWHERE, *WARNED_BATCHES, *WARNED_FUSED_ATTENTION, *WARNED_MOE, *WARNED_PAIRS, *WARNED_STAGES]

__all__ = ["BASE", "BROKEN", "WARNED", "Case"]
