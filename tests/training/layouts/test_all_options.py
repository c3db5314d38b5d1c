"""Every kind of layer with all of its options on, cut by tensor parallelism and by ZeRO 3 at once.

ZeRO 3 gathers a parameter when it is read, on all ranks together. A rank that reads one by itself, or outside of the
module that has it, stops the run in its first step. Options add parameters, so each is on here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.float64 import FP32
from tests.margins import Measured
from tests.training import runs
from tests.training.matrix import merged
from tests.workers import run

pytestmark = pytest.mark.layouts

TIMES = {"time_step_low": 0.3, "time_step_high": 1.0}
LOW_RANK = {f"{name}_rank": 4 for name in ("decay", "rate", "value", "gate")}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {
        "layers": "attention/mlp attention@other/mlp",
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "full", "qkv_bias": True, "output_bias": True, "window": 5},
        "variants": {"other": {"kv_heads": 1, "qk_norm": "head", "position": "alibi", "softcap": 5.0, "dropout": 0.1}},
        "mlp": {"hidden_size": 48, "gated": True, "bias": True, "activation": "silu"},
    },
    "attention, parallel": {
        "layers": "attention/mlp x2",
        "residual": {"form": "parallel", "shared_norm": True},
        "norm": {"type": "layernorm"},
        "attention": {"heads": 4, "kv_heads": 1, "qkv_bias": True, "output_bias": True, "dropout": 0.1},
        "mlp": {"hidden_size": 48, "bias": True},
    },
    "attention, sinks and norms on both sides": {
        "layers": "attention/mlp attention@one/mlp",
        "norm": {"unit_offset": True},
        "residual": {"norm": "both"},
        "attention": {"heads": 4, "kv_heads": 2, "sinks": True, "qkv_bias": True, "output_bias": True, "window": 5},
        "variants": {"one": {"kv_heads": 1, "window": None}},
        "mlp": {"hidden_size": 48, "gated": True, "activation": "gelu_tanh"},
    },
    "mamba": {
        "layers": "mamba mamba@heads/mlp",
        "mamba": {"state_size": 4, "chunk": 5, "bias": True, "inner_norms": True, "rank": 6, **TIMES},
        "variants": {"heads": {"heads": 2}},
        "mlp": {"hidden_size": 48, "bias": True},
    },
    "mamba2": {
        "layers": "mamba2 mamba2@one",
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2, "chunk": 5, "bias": True, "most_step": 0.9, **TIMES},
        "variants": {"one": {"groups": 1, "inner_size": 96}},
    },
    "shared attention": {
        "layers": "mamba2+shared_attention x3",
        "mamba2": {"head_dim": 8, "state_size": 8, "bias": True, "chunk": 5, **TIMES},
        "shared_attention": {
            "heads": 4,
            "kv_heads": 2,
            "blocks": 2,
            "adapter_rank": 3,
            "attention_adapters": True,
            "qkv_bias": True,
            "output_bias": True,
            "mlp": {"hidden_size": 40, "bias": True},
        },
    },
    "gated_delta": {
        "layers": "gated_delta x2",
        "gated_delta": {
            "heads": 4,
            "key_heads": 2,
            "key_dim": 8,
            "value_dim": 8,
            "chunk": 5,
            "negative_eigenvalues": True,
            "convolution_bias": True,
            "norm_epsilon": 0.01,
            "decay_low": 0.5,
            "decay_high": 2.0,
            **TIMES,
        },
    },
    "cca": {
        "layers": "cca cca@odd",
        "cca": {"heads": 8, "kv_heads": 4, "head_dim": 4, "depthwise": 3, "qkv_bias": True, "output_bias": True},
        "variants": {"odd": {"kv_heads": 2, "window": 5, "temperature": "linear", "rotary": {"fraction": 0.5}}},
    },
    "mla": {
        "layers": "mla mla@odd",
        "mla": {
            "heads": 4,
            "query_rank": 12,
            "kv_rank": 10,
            "nope_dim": 6,
            "rope_dim": 4,
            "value_dim": 8,
            "bias": True,
        },
        "variants": {"odd": {"query_rank": None, "position": "none", "dropout": 0.1, "scale": 0.5}},
    },
    **{
        f"rwkv{version}": {
            "layers": f"rwkv{version}/rwkv{version}_ffn x2",
            f"rwkv{version}": {"chunk": 5, "init": "model", **own},
            f"rwkv{version}_ffn": {"init": "model"},
        }
        for version, own in {
            4: {},
            5: {"head_dim": 8},
            6: {"head_dim": 8, "mix_rank": 4, "decay_rank": 4},
            7: {"head_dim": 8, **LOW_RANK},
        }.items()
    },
    "moe": {
        "layers": "moe x2",
        "moe": {
            "experts": 4,
            "hidden_size": 16,
            "shared_size": 16,
            "shared_gate": True,
            "router": {"bias": True, "normalize": True, "correction": "sign", "groups": 2, "jitter": 0.1},
            "losses": {"sequence": 0.1, "z": 0.05},
        },
    },
    "moe, biases and limits": {
        "layers": "attention/mlp moe",
        "attention": {"heads": 4},
        "mlp": {"hidden_size": 48, "bias": True},
        "moe": {
            "experts": 4,
            "hidden_size": 16,
            "activation": "quick_gelu",
            "bias": True,
            "limit": 0.7,
            "up_offset": 1.0,
            "router": {"bias": True, "normalize": True},
            "losses": {"balance": 0.0, "z": 0.05},
        },
    },
    "moe, router states": {
        "layers": "attention/moe@first attention/moe",
        "attention": {"heads": 4},
        "moe": {
            "experts": 4,
            "top_k": 1,
            "hidden_size": 16,
            "router": {"network": "mlp", "width": 8, "skip": True, "correction": "sign"},
        },
        "variants": {"first": {"router": {"average": False}}},
    },
}
AROUND = {
    "model": {
        "hidden_size": 32,
        "vocab_size": 99,
        "norm": {"type": "rmsnorm"},
        "init": {"std": 0.15, "output": "normal"},
        "embedding": {"norm": True, "position": "learned", "multiplier": 1.5},
        "residual": {"channel_scales": True},
        "head": {"bias": True, "softcap": 8.0},
        "dropout": 0.1,
    },
    "training": {"steps": 2, "sequence_length": 12, "micro_batch_size": 2, "global_batch_size": 8, "z_loss": 0.01},
    "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9, "gradient_clipping": 0.5},
    "data": {"synthetic": "copy", "reset_attention_at_eod": True},
}


WHOLE = ("attention",)  # with whole sequences too. The others wait for `-m slow`


def cases() -> list:
    whole = [pytest.param(name, False, marks=[] if name in WHOLE else [pytest.mark.slow]) for name in MODELS]
    return [*((name, True) for name in MODELS), *whole]


@pytest.mark.parametrize(("name", "sequence"), cases())
def test_tensor_parallel_at_zero_3(name: str, sequence: bool):
    around = AROUND
    if MODELS[name].get("residual"):  # a parallel residual has no channel scales
        around = merged(AROUND, {"model": {"residual": {"channel_scales": False}}})
    values = merged(around, {"model": MODELS[name]})
    expected = runs.plainly(values)
    cut = {"parallel": {"tensor": 2, "sequence": sequence}, "zero": {"stage": 3, "persistent_size": 0}}
    for losses, norms, evaluation, _ in run(4, runs.train, merged(values, cut), 4):
        for found, wanted in ((losses, expected.losses), (norms, expected.norms), (evaluation, expected.evaluation)):
            assert max(Measured(abs(one / other - 1)) for one, other in zip(found, wanted)) < FP32
