"""Adapters without a run: bad input, targets, the linear layers of each kind, and memory by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config import ConfigError, load, resolve
from megatron.config.problems import UserError
from megatron.features.adapters.options import is_target, linear_names
from megatron.features.adapters.part import LINEARS, adapt
from megatron.model.costs.traffic import NotPredicted
from megatron.model.stack import ModelPlan, build_model
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import Mesh
from megatron.plan.candidate import Candidate
from megatron.plan.memory import rank_memory
from megatron.plan.messages.predict import predict
from megatron.plan.shapes import Shapes
from tests.paths import ROOT
from tests.training import runs
from tests.workers import run as on_ranks

PLAIN = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 64, "attention": {"heads": 2}},
    "training": {"steps": 2, "sequence_length": 16, "global_batch_size": 2},
    "data": {"synthetic": "copy"},
}


@pytest.mark.parametrize(
    "changes, key, rule",
    [
        ({"adapter": {"type": "lora", "targets": ["attention.nothing"]}}, "adapter.targets", "must be the end of"),
        ({"adapter": {"type": "lora", "targets": []}}, "adapter.targets", "must name a linear layer"),
        ({"adapter": {"type": "lora", "rank": 0}}, "adapter.rank", "above 0"),
        ({"adapter": {"type": "lora", "dropout": 1.0}}, "adapter.dropout", "less than 1"),
        ({"adapter": {"type": "lora"}, "checkpoint": {}}, "checkpoint.initialize_from", "must be given"),
        ({"adapter": {"initialize_from": "x"}}, "adapter.initialize_from", "without adapters"),
        ({"checkpoint": {"initialize_from": "x", "initialize_map": {"a": "b"}}}, "checkpoint.initialize_map", "empty"),
        ({"parallel": {"tensor": 2, "sequence": True, "async_tensor": True}}, "parallel.async_tensor", "must be false"),
        ({"model": {**PLAIN["model"], "attention": {"heads": 2, "qk_clip": 100.0}}}, "adapter.type", "must be none"),
    ],
)
def test_bad_input_is_refused_before_the_start(changes: dict[str, Any], key: str, rule: str) -> None:
    values = {**PLAIN, "adapter": {"type": "lora"}, "checkpoint": {"initialize_from": "base"}, **changes}
    with pytest.raises(ConfigError) as caught:
        resolve(values, ranks=2)
    assert key in str(caught.value) and rule in str(caught.value)


def without_targets() -> str:
    """The error of a rank, whose launcher starts a run again after other errors."""
    values = {**PLAIN, "adapter": {"type": "lora", "targets": ["layers.0.*"]}, "parallel": {"pipeline": 2}}
    with pytest.raises(UserError) as caught:
        runs.start({**values, "checkpoint": {"initialize_from": "base"}}, 2)
    return str(caught.value)


def test_all_ranks_stop_where_a_stage_has_no_target() -> None:
    assert all("rank 1 of the pipeline has none" in each for each in on_ranks(2, without_targets))


@pytest.mark.parametrize(
    "target, layers",
    [
        ("layers.1.*", {"layers.1.attention.query", "layers.1.attention.key_value", "layers.1.attention.output",
                        "layers.1.mlp.up", "layers.1.mlp.down"}),
        ("attention.query", {f"layers.{number}.attention.query" for number in range(12)}),
        ("layers.1.attention.query", {"layers.1.attention.query"}),
        ("1.mlp.*", {"layers.1.mlp.up", "layers.1.mlp.down"}),
    ],
)  # fmt: skip
def test_targets_are_ends_of_names_with_any_text_for_a_star(target: str, layers: set[str]) -> None:
    model = {**PLAIN["model"], "layers": "(attention/mlp) x12"}
    adapter = {"type": "lora", "targets": [target]}
    config = resolve({**PLAIN, "model": model, "adapter": adapter, "checkpoint": {"initialize_from": "base"}})
    assert {name for name in linear_names(config) or () if is_target(name, [target])} == layers


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "test").glob("tiny_*.yml")), ids=lambda path: path.stem)
def test_kinds_name_their_linear_layers(path: Path) -> None:
    """The adapted layers that rules know without torch are the adapted layers."""
    config = load([str(path)], [], ranks=1, check_inputs=False).config
    model = build_model(config, device="meta")
    named = linear_names(config)
    if named is None:
        pytest.skip("a kind that does not say its linear layers")
    layers = adapt(model, ModelPlan(config, Mesh.single(), device="meta"))
    assert set(layers) == set(named)
    assert all(type(each) in LINEARS and not logical_of(each.weight).stacked for each in layers.values())


def test_a_plan_counts_neither_gradients_nor_states_of_frozen_weights() -> None:
    """The rest is in proportion to rank / width: two small matrices of a square one."""

    def parts(**adapter: Any) -> dict[str, float]:
        values = {**PLAIN, "adapter": adapter, "checkpoint": {"initialize_from": "base" if adapter else None}}
        config = resolve({**values, "model": {**PLAIN["model"], "hidden_size": 128}}, ranks=2)
        shapes = Shapes(config, 2)
        return rank_memory(config, shapes, Candidate(), 0).parts

    plain, adapted = parts(), parts(type="lora", rank=4)
    assert adapted["weights"] == plain["weights"]
    for name in ("gradients", "states"):
        assert adapted[name] == pytest.approx(plain[name] * 2 * 4 / 128)
    with pytest.raises(NotPredicted, match="adapters"):
        predict(
            resolve({**PLAIN, "adapter": {"type": "lora"}, "checkpoint": {"initialize_from": "base"}}, ranks=2), 2, 0
        )
