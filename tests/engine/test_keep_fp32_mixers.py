"""Parameters that gated_delta, cca and RWKV declare as fp32 stay so inside bf16 engines, and the forward pass uses the
masters.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.test_keep_fp32 import LAYOUTS, VALUES, train
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import merged
from tests.workers import run

MODELS = {
    "gated_delta, cca": (
        {"A_log", "dt_bias", "temperature"},
        {
            "layers": "gated_delta cca gated_delta/mlp cca/mlp",
            "gated_delta": {"heads": 4, "norm_epsilon": 0.01},
            "cca": {"heads": 4, "head_dim": 8},
        },
    ),
    "rwkv": (
        {"decay", "bonus", "decay_base", "rate_base", "blend_base", "key_scale", "rate_scale"},
        {
            "layers": "rwkv4/rwkv4_ffn rwkv6/rwkv6_ffn (rwkv7/rwkv7_ffn) x2",
            "rwkv4": {"init": "model"},
            "rwkv6": {"head_dim": 8, "init": "model"},
            "rwkv7": {"head_dim": 8, "init": "model"},
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", toured(["tp2, sequence parallel, ZeRO 1", "dp2, ZeRO 3"], "layouts"))
def test_fp32_stays_fp32(layout: str, name: str):
    (ranks, cut), (kept, model) = LAYOUTS[layout], MODELS[name]
    results = run(ranks, train, merged(VALUES, {"model": model}, cut), ranks)
    masters = {name: values for (name, _), values in runs.assemble([result[5] for result in results]).items()}
    fine = 0
    for before, after, _, _, used, _ in results:
        assert before == after
        for key, dtype in before.items():
            assert dtype == (torch.float32 if key.split(".")[-1] in kept else torch.bfloat16), key
        assert {name.split(".")[-1] for name in used} == kept
        for name, (values, tensor, rank, size) in used.items():
            wanted = runs.local_shard(masters[name].reshape(tensor.shape), tensor, rank, size if tensor.shard else 1)
            np.testing.assert_array_equal(values.reshape(-1), wanted, err_msg=name)
            fine += int((torch.from_numpy(values).bfloat16().float().numpy() != values).sum())
    assert fine > 20  # digits that bf16 does not have
