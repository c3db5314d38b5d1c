"""A mixture of experts with random parameters in float64, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config import resolve
from megatron.kinds.moe.layer import MoE
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE
from tests.model.parity import randomise

H = 16


def config_of(moe: dict, **model):
    values = {
        "layers": "attention/moe",
        "hidden_size": H,
        "vocab_size": 37,
        "attention": {"heads": 2},
        "moe": moe,
        **model,
    }
    return resolve({"model": values, "training": {"steps": 1, "sequence_length": 24}})


def layer(seed: int = 0, **moe) -> MoE:
    """A layer with random parameters and, where it has one, a random correction."""
    config = config_of({"experts": 8, "hidden_size": 12, **moe})
    model = config.model
    made = MoE(
        ParameterFactory(Mesh.single(), dtype=DOUBLE).scope("moe"), model, model.moe, Initialisation(model.init, H, 1)
    )
    randomise(made, seed)
    if made.balance.correction is not None:
        made.balance.correction.copy_(0.3 * torch.randn(8, generator=torch.Generator().manual_seed(seed + 9)))
    return made


def run(moe: MoE, x: Tensor) -> Tensor:
    y = moe(x, Stream(x))
    return y if isinstance(y, Tensor) else y[0]


def inputs(tokens: int = 20, seed: int = 5) -> Tensor:
    return torch.randn(2, tokens // 2, H, generator=torch.Generator().manual_seed(seed)).to(DOUBLE).requires_grad_()
