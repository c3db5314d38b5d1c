"""Decays of gated_delta and temperatures of cca stay in fp32 inside bf16 engines, and the forward pass uses the masters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training import runs
from tests.training.matrix import merged
from tests.training.test_keep_fp32 import LAYOUTS, VALUES, train
from tests.workers import run

FP32 = {"A_log", "dt_bias", "temperature"}
MODEL = {
    "layers": "gated_delta cca gated_delta/mlp cca/mlp",
    "gated_delta": {"heads": 4, "norm_epsilon": 0.01},
    "cca": {"heads": 4, "head_dim": 8},
}


@pytest.mark.parametrize("layout", ["tp2, sequence parallel, ZeRO 1", "dp2, ZeRO 3"])
def test_fp32_stays_fp32(layout: str):
    ranks, cut = LAYOUTS[layout]
    results = run(ranks, train, merged(VALUES, {"model": MODEL}, cut), ranks)
    masters = {name: values for (name, _), values in runs.assemble([result[5] for result in results]).items()}
    fine = 0
    for before, after, _, _, used, _ in results:
        assert before == after
        for name, dtype in before.items():
            assert dtype == (torch.float32 if name.split(".")[-1] in FP32 else torch.bfloat16), name
        assert {name.split(".")[-1] for name in used} == FP32
        for name, (values, tensor, rank, size) in used.items():
            wanted = runs.local_shard(masters[name].reshape(tensor.shape), tensor, rank, size if tensor.shard else 1)
            np.testing.assert_array_equal(values.reshape(-1), wanted, err_msg=name)
            fine += int((torch.from_numpy(values).bfloat16().float().numpy() != values).sum())
    assert fine > 20  # digits that bf16 does not have
