"""The figures of warnings about size: never above the layers' own counts and the bytes that a run writes."""

from __future__ import annotations

import pytest

from megatron.checkpoint.save.policy import reason_to_save
from megatron.config import load
from megatron.config.rule_context import RuleContext
from megatron.config.rules.cost import WeightCounts, kept_checkpoints
from megatron.model.costs.describe import totals
from tests.paths import ROOT


def context_of(name: str, *overrides: str) -> RuleContext:
    resolved = load([ROOT / "configs" / f"{name}.yml"], overrides, ranks=8, check_inputs=False)
    return RuleContext(resolved.config, 8, lambda path: resolved.origins[".".join(map(str, path))])


MLA = ("model.layers=(mla/mlp) x8 (mla@direct/mlp) x24", "model.mla.heads=32", "model.mla.query_rank=1536")
DIRECT = "model.variants.direct.query_rank=null"


@pytest.mark.parametrize(
    "name, share, overrides",
    [
        ("pythia/6.9b", 0.99, ()),
        ("llama/llama3_8b", 0.999, ()),
        ("llama/llama3_8b", 0.999, (*MLA, DIRECT)),
        ("test/tiny_moe", 0.5, ()),
        ("test/tiny_rwkv7", 0, ()),
    ],
)
def test_never_more_than_the_layers_count(name, share, overrides):
    at = context_of(name, *([] if name.startswith("test") else ["data.synthetic=copy"]), *overrides)
    whole = totals(at.config).parameters
    assert share * whole <= WeightCounts.of(at).total <= whole


@pytest.mark.parametrize(
    "options",
    [
        {"every": 10},
        {"every": 30},
        {"every": 10, "log_spaced": "true"},
        {"every": 10, "steps": "[5, 20, 77]", "at_end": "false"},
        {"every": 10, "keep_last": 3},
        {"every": 10, "keep_last": 1, "keep_every": 50},
    ],
)
def test_as_many_checkpoints_as_the_policy_saves(options):
    words = (f"checkpoint.{key}={value}" for key, value in options.items())
    at = context_of("test/tiny_neox", "training.steps=101", *words)
    saved = [step for step in range(102) if reason_to_save(at.config.checkpoint, step, last_step=101)]
    last, always = at.config.checkpoint.keep_last, at.config.checkpoint.keep_every
    kept = {*saved[-last if last else None :], *(step for step in saved if always and step and step % always == 0)}
    assert kept_checkpoints(at) == len(kept)
