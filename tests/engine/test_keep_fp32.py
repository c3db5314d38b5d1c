"""Parameters that must stay in fp32 do so inside bf16 engines, and are updated as in plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.selection import toured
from tests.training import runs
from tests.workers import run

VALUES = {
    "model": {
        "layers": "(mamba2 mamba attention/mlp) x2",
        "hidden_size": 32,
        "vocab_size": 99,
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4},
        "mlp": {"hidden_size": 48},
        "mamba": {"state_size": 4},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2},
    },
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 8, "seed": 7},
    "data": {"synthetic": "copy"},
    "precision": "bf16",
    "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.0, "gradient_clipping": 1.0},
}
FP32 = ("A_log", "D", "dt_bias")
LAYOUTS = {
    "one, ZeRO 1": (1, {"zero": {"stage": 1}}),
    "dp2, ZeRO 1": (2, {"zero": {"stage": 1}}),
    "dp2, ZeRO 2": (2, {"zero": {"stage": 2}}),
    "dp2, ZeRO 3": (2, {"zero": {"stage": 3, "persistent_size": 0}}),
    "dp2, ZeRO 3, small parameters kept": (2, {"zero": {"stage": 3, "persistent_size": 100}}),
    "tp2, sequence parallel, ZeRO 1": (2, {"parallel": {"tensor": 2, "sequence": True}, "zero": {"stage": 1}}),
    "pp2, ZeRO 1": (2, {"parallel": {"pipeline": 2}, "zero": {"stage": 1}}),
    "dp2, ZeRO 2, offloaded optimizer": (2, {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
}


def types_and_values(engine) -> tuple[dict[str, torch.dtype], dict[str, torch.Tensor]]:
    """Types of all parameters by name, and the whole local values of each that should be fp32."""
    import deepspeed

    parameters = list(engine.module.parameters())
    gathered = [p for p in parameters if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
        types = {p.logical.name: p.dtype for p in parameters}
        values = {p.logical.name: p.detach().clone() for p in parameters if p.logical.keep_fp32}
    return types, values


def train(values: dict, ranks: int):
    """Types before and after training, and losses. Values of fp32 parameters in the forward pass, and masters."""
    config, engine = runs.start(values, ranks)
    before, _ = types_and_values(engine)
    losses, norms = runs.steps(config, engine, 0, config.training.steps)
    after, used = types_and_values(engine)
    at = engine.mesh.tensor
    places = {p.logical.name: (p.logical, at.rank, at.size) for p in engine.module.parameters()}
    masters = runs.portable(f for f in engine.state.fragments() if f.state == "master")
    return before, after, losses, norms, {name: (value.numpy(), *places[name]) for name, value in used.items()}, masters


@pytest.fixture(scope="module")
def plain() -> runs.Outcome:
    return runs.plainly(VALUES)


@pytest.mark.parametrize("layout", toured(LAYOUTS, "layouts"))
def test_fp32_stays_fp32(layout: str, plain: runs.Outcome):
    ranks, cut = LAYOUTS[layout]
    results = run(ranks, train, {**VALUES, **cut}, ranks)
    masters = {name: values for (name, _), values in runs.assemble([result[5] for result in results]).items()}
    fine = 0
    for before, after, losses, norms, used, _ in results:
        for types in (before, after):
            for name, dtype in types.items():
                assert dtype == (torch.float32 if name.split(".")[-1] in FP32 else torch.bfloat16), name
        assert losses == pytest.approx(plain.losses, rel=3e-3) and norms == pytest.approx(plain.norms, rel=2e-2)
        for name, (values, tensor, rank, size) in used.items():
            # the forward pass uses the master itself, digits below bf16 included
            wanted = runs.local_shard(masters[name].reshape(tensor.shape), tensor, rank, size if tensor.shard else 1)
            np.testing.assert_array_equal(values.reshape(-1), wanted, err_msg=name)
            fine += int((torch.from_numpy(values).bfloat16().float().numpy() != values).sum())
    assert fine > 100
    for name, values in plain.weights.items():
        if name.split(".")[-1] in FP32:
            np.testing.assert_allclose(masters[name], values, atol=1e-3, err_msg=name)
