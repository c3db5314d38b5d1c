"""Messages of a step follow the formulas, to the byte, on every layout that has one.

A version of DeepSpeed that sends something else, or a layer that sends more than it says, fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from megatron.config import Config, resolve
from megatron.config.variants import overlay
from megatron.model.costs.exchanges import BY_DOCUMENTS, MEAN, MOST
from megatron.model.costs.traffic import NotPredicted
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.traffic import Call, Tally, wire_bytes
from megatron.plan.messages import predict as traffic
from megatron.plan.messages.predict import TrafficPrediction, predict
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import Case, cases
from tests.workers import run

# One of each: a way of reducing gradients, of cutting layers, a family of layers. The rest is slow.
OFTEN = {
    "fp32: llama on dp2, ZeRO 2, four micro-batches",
    "fp32: neox on dp2, ZeRO 1, four micro-batches",
    "fp32: llama on dp2, ZeRO 3, four micro-batches, recomputation",
    "fp32: state space on tp2, sequence parallel, selective recomputation",
    "fp32: moe on tp2, sequence parallel, selective recomputation",
    "fp32: gpt2 on tp2 · pp2, sequence parallel, recomputation",
    "fp32: zamba2 on pp2, two stages per rank",
    "fp32: gpt2 on pp2 · dp2, two stages per rank, ZeRO 2",
    "fp32: gpt2 on pp2 · dp2, ZB-V, ZeRO 3 gathered once",
    "fp32: zamba2 on pp2 · dp2, two stages per rank, zero bubble, ZeRO 3, recomputation",
    "bf16: llama on dp2, ZeRO 1, four micro-batches",
    "fp32: state space on cp2, ZeRO 0",
    "fp32: mqa on cp4 nested, ZeRO 2, recomputation",
    "fp32: moe on dp2 · ep2, ZeRO 1, four micro-batches",
    "fp32: even vocabulary on fold2 by gathering, ZeRO 1, recomputation",
    "fp32: olmo2 on tp2 · col2, ZeRO 0, recomputation",
    "fp32: state space on tp2 · col2, ZeRO 0, recomputation",
    "fp32: rwkv7 on col2 · pp2, ZeRO 1",
    "fp32: moe on depth2 · pp2 · ep2, ZeRO 1",
    "fp32: moe on col2 · dp2 · ep2, ZeRO 1",
    "fp32: gpt_oss on col2 · depth2, ZeRO 0",
    "fp32: deepseek on tp2 · col2, ZeRO 0, recomputation",
    "fp32: llama on depth2, ZeRO 1, selective recomputation",
    "fp32: documents on pp2 · cp2 by gathering, ZeRO 1, recomputation",
    "Muon: llama on dp2, ZeRO 1, four micro-batches",
    "fp32: recurrent depth on tp2, sequence parallel, selective recomputation",
}
# Runs of the matrix without a formula, by the reason that is given.
UNPREDICTED = {"there is no formula for a recurrent core at ZeRO 3 whose passes are drawn": 6}


def predictions(case: Case) -> list[TrafficPrediction] | str:
    """Of each rank. The reason where there is none."""
    config = resolve(case.values, ranks=case.ranks)
    try:
        return [predict(config, case.ranks, rank, weighted=True) for rank in range(case.ranks)]
    except NotPredicted as error:
        return str(error)


def counted(values: dict, ranks: int, steps: int = 2) -> list[list[list]]:
    """On every rank: the accounts of the first steps."""
    return account_of(*runs.start(values, ranks), steps)


def account_of(config: Config, engine: Any, steps: int) -> list[list[list]]:
    """Of the first steps of an engine, on this rank."""
    from megatron.parallel.messages.account import Recorder
    from megatron.training.hooks.communication import label_layers

    recorder, data, found = Recorder(engine.mesh), engine.mesh.data, []
    label_layers(recorder, engine.deepspeed.module)
    recorder.install()
    try:
        for step in range(steps):
            engine.step(runs.local_batch(config, step, data.rank, data.size), config.optimizer.lr)
            found.append(recorder.tally.take().rows())
    finally:
        recorder.remove()
    return found


def trained_and_counted(values: dict, ranks: int) -> tuple[tuple, list[list[list]]]:
    """On every rank: the results of `runs.train`, and the account of each of its steps."""
    from megatron.parallel.messages.account import Recorder
    from megatron.training.hooks.communication import label_layers

    config, engine = runs.start(values, ranks)
    recorder, step, found = Recorder(engine.mesh), engine.step, []

    def counted_step(*arguments: Any) -> Any:
        label_layers(recorder, engine.deepspeed.module)  # until the recorder is removed
        recorder.install()
        try:
            return step(*arguments)
        finally:
            recorder.remove()
            found.append(recorder.tally.take().rows())

    engine.step = counted_step
    return runs.trained(config, engine), found


def parameters() -> list:
    several = [case for case in cases() if case.ranks > 1]
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in OFTEN else [pytest.mark.slow]) for case in several
    ]


@pytest.mark.parametrize("case", toured(parameters(), "layouts"))
def test_counted_and_predicted_are_equal(case: Case):
    predicted = predictions(case)
    if isinstance(predicted, str):
        assert predicted in UNPREDICTED
        pytest.skip(predicted)
    steps = max(2, predicted[0].settled + 1)
    every = [list(map(Tally.of_rows, found)) for found in run(case.ranks, counted, case.values, case.ranks, steps)]
    expected, at_most = Tally(), {call for own in predicted for call in own.calls(MOST)}
    for rank, (own, found) in enumerate(zip(predicted, every)):
        first, last = (own.at(step, documents_of(case, rank, step)) for step in (0, steps - 1))
        if not own.settled:
            assert exact(own, first + own.first) == exact(own, found[0]), f"rank {rank}, first step"
        assert exact(own, last) == exact(own, found[-1]), f"rank {rank}"
        assert_at_most(found[-1], own.at(steps - 1), own.calls(MOST, BY_DOCUMENTS), own.calls(MOST))
        expected += last  # with what the tokens decide
    given = sum((found[-1] for found in every), Tally())
    both = [Tally(entry for entry in tally if entry[0] not in at_most).rows() for tally in (expected, given)]
    assert both[0] == both[1]


def documents_of(case: Case, rank: int, step: int) -> Tensor | None:
    """Of the batch of a step."""
    config = resolve(case.values, ranks=case.ranks)
    data = Mesh.describe(Layout.of(config, case.ranks), rank).data
    return runs.local_batch(config, step, data.rank, data.size).documents


def comparable(own: TrafficPrediction, tally: Tally, *exact: str) -> Tally:
    """An account of this rank without the bytes that are predicted only for all ranks together, and without calls that
    have only a predicted bound.

    Args:
        exact: what the data decide and this prediction knows.
    """
    left = {call: how for call, how in own.by_data.items() if how not in exact}
    kept = (entry for entry in tally if left.get(entry[0], MEAN) == MEAN)
    return Tally((call, messages, 0 if call in left else size) for call, messages, size in kept)


def exact(own: TrafficPrediction, tally: Tally) -> list:
    """Messages that are predicted to the byte where documents are known."""
    return comparable(own, tally, BY_DOCUMENTS).rows()


def assert_at_most(counted: Tally, most: Tally, calls: frozenset[Call], same: frozenset[Call] = frozenset()) -> None:
    """No more messages and bytes of these calls than there can be. Of those in `same` the same number of messages.

    Args:
        same: calls whose bytes depend only on the data.
    """
    given, bounds = ({call: count for call, *count in tally if call in calls} for tally in (counted, most))
    assert set(given) <= set(bounds) == calls
    for call, (messages, size) in given.items():
        assert messages <= bounds[call][0] and size <= bounds[call][1], call
    for call in same:
        assert given.get(call, [0])[0] == bounds[call][0], call


def unpredicted() -> dict[str, list[str]]:
    """The runs of the matrix that have no prediction, by reason."""
    found: dict[str, list[str]] = {}
    for case in cases():
        if case.ranks > 1 and isinstance(reason := predictions(case), str):
            found.setdefault(reason, []).append(case.name)
    return found


@pytest.mark.slow
def test_the_runs_without_a_prediction_are_known():
    found = unpredicted()
    assert {reason: len(names) for reason, names in found.items()} == UNPREDICTED, found


def test_every_architecture_is_predicted_with_shared_rows():
    """One run of each. The formulas read all modules of a model there."""
    one = {case.architecture: case for case in cases() if case.values.get("parallel", {}).get("depth", 1) > 1}
    assert len(one) > 10
    for case in one.values():
        assert predict(resolve(case.values, ranks=case.ranks), case.ranks, 0).step.by("group")


def test_what_runs_often_is_there_and_predicted():
    named = {case.name: case for case in cases()}
    assert OFTEN <= set(named)
    for name in OFTEN:
        assert not isinstance(predictions(named[name]), str), name


@pytest.mark.parametrize(
    ("stage", "accumulate", "reduce"), [(1, "bf16", "fp32"), (2, "fp32", "bf16"), (3, "fp32", "fp32")]
)
def test_ways_of_bf16(stage: int, accumulate: str, reduce: str):
    """ZeRO 1 that sums micro-batches in bf16 and ZeRO 2 ask all ranks whether gradients are finite. ZeRO 3 does not."""
    case = next(case for case in cases() if case.name == "bf16: llama on dp2, ZeRO 1, four micro-batches")
    precision = {"compute": "bf16", "accumulate": accumulate, "reduce": reduce}
    values = {**case.values, "precision": precision, "zero": {"stage": stage, "persistent_size": 100}}
    own = predict(resolve(values, ranks=2), 2, 0, weighted=True)
    assert own.step.by("dtype", "operation").get(("uint8", "all_reduce")) == (None if stage == 3 else (1, 1))
    assert [found[-1] for found in run(2, counted, values, 2)] == [own.step.rows()] * 2


def test_a_model_that_zero_3_gathers_in_pieces_has_no_formula():
    case = next(case for case in cases() if case.name == "fp32: llama on dp2, ZeRO 3, one micro-batch")
    for key in ("prefetch_size", "bucket_size"):
        values = {**case.values, "zero": {**case.values["zero"], key: 5000}}
        with pytest.raises(NotPredicted, match="several pieces"):
            predict(resolve(values, ranks=2), 2, 0)


def test_a_core_that_runs_as_often_in_each_step_at_zero_3():
    """Its modules come in one order, which DeepSpeed learns once."""
    case = next(case for case in cases() if case.name == "fp32: recurrent state space on dp2, ZeRO 3, one micro-batch")
    recurrence = {**case.values["model"]["recurrence"], "sampling": "fixed"}
    values = {**case.values, "model": {**case.values["model"], "recurrence": recurrence}}
    own = predict(resolve(values, ranks=2), 2, 0, weighted=True)
    found = run(2, counted, values, 2, own.settled + 1)[0]
    assert own.step.rows() == found[-1] != found[0]


@pytest.mark.parametrize("bucket", [3000, 700])
def test_small_buckets(bucket: int):
    """A bucket is full when the next parameter would overfill it. A larger parameter is a bucket of its own."""
    case = next(case for case in cases() if case.name == "fp32: llama on dp2, ZeRO 1, four micro-batches")
    values = {**case.values, "zero": {**case.values["zero"], "bucket_size": bucket}}
    own = predict(resolve(values, ranks=2), 2, 0, weighted=True)
    messages, size = own.step.by("phase", "operation")["backward", "reduce_scatter"]
    whole = predict(resolve(overlay(values, {"zero": {"bucket_size": 10**9}}), ranks=2), 2, 0, weighted=True)
    fewer, least = whole.step.by("phase", "operation")["backward", "reduce_scatter"]
    assert messages > 5 > fewer and least <= size <= least + 4 * 3 * messages  # a bucket is padded to a multiple of 4
    assert [own.step.rows()] * 2 == run(2, counted, values, 2)[0]


def in_small_buckets(work: Callable[..., Any], values: dict, ranks: int, elements: int) -> Any:
    """`work(values, ranks)` with buckets of this number of elements where no key of the configuration says it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    usual = DeepSpeedEngine._reduce_non_expert_gradients
    DeepSpeedEngine._reduce_non_expert_gradients = lambda self, gradients, _: usual(self, gradients, elements)
    try:
        return work(values, ranks)
    finally:
        DeepSpeedEngine._reduce_non_expert_gradients = usual


@pytest.mark.parametrize(
    "name", ["Muon in bf16: llama on dp2, ZeRO 1, four micro-batches", "fp32: neox on pp2 · dp2, ZeRO 0"]
)
@pytest.mark.parametrize("elements", [4000, 300])
def test_small_buckets_of_the_fallback(name: str, elements: int, monkeypatch):
    """Larger tensors travel on their own. The bf16 optimizer has one for each group of parameters."""
    case = next(case for case in cases() if case.name == name)
    monkeypatch.setattr(traffic, "FALLBACK_BUCKET", elements)
    own = predictions(case)
    messages, _ = own[0].step.by("phase", "operation")["backward", "all_reduce"]
    assert messages > 1
    found = run(case.ranks, in_small_buckets, counted, case.values, case.ranks, elements)
    assert [each.step.rows() for each in own] == [second for _, second in found]
    usual = run(case.ranks, runs.train, case.values, case.ranks)
    for one, other in zip(usual, run(case.ranks, in_small_buckets, runs.train, case.values, case.ranks, elements)):
        assert one[:3] == other[:3]  # of two numbers there is one sum


def test_formulas_of_a_large_model():
    """Against the papers: 4 sums of b s h per layer and micro-batch, half of them in the forward pass. ZeRO 1 sends the
    model's gradients and its weights."""
    config = resolve(
        {
            "model": {
                "layers": "(attention/mlp) x24", "hidden_size": 2048, "vocab_size": 50304, "attention": {"heads": 16},
            },
            "training": {
                "steps": 1,
                "sequence_length": 2048, "micro_batch_size": 4, "global_batch_size": 64, "loss_chunk": 1024,
            },
            "parallel": {"tensor": 2},
            "precision": "bf16",
            "data": {"synthetic": "copy"},
        },
        ranks=8,
    )  # fmt: skip
    step = predict(config, 8, 0).step
    b_s_h, layers, micro_batches = 4 * 2048 * 2048, 24, 64 // 4 // 4
    layer = Tally((call, *count) for call, *count in step if call.layer.startswith("layers."))
    assert layer.by("phase") == {
        ("backward",): (2 * layers * micro_batches, 2 * layers * micro_batches * b_s_h * 2),
        ("forward",): (2 * layers * micro_batches, 2 * layers * micro_batches * b_s_h * 2),
    }
    data = step.by("group", "operation", "dtype")
    gradients, weights = data["data", "reduce_scatter", "fp32"][1] // 4, data["data", "all_gather", "bf16"][1] // 2
    parameters = (24 * 12 * 2048**2 + 2 * 50304 * 2048) // 2  # matrices of one tensor parallel rank. Vectors besides
    assert gradients == weights and parameters < weights < parameters * 1.001


def test_a_part_without_a_formula_is_named():
    case = next(case for case in cases() if case.name == "fp32: recurrent state space on dp2, ZeRO 3, one micro-batch")
    assert "a recurrent core at ZeRO 3 whose passes are drawn" in predictions(case)


@pytest.mark.parametrize(
    ("stage", "precision", "wire", "stages"),
    toured(
        [(1, "fp32", "int8_block", 2), (0, "fp32", "top_k", 1), (1, "bf16", "bf16", 1), (2, "fp32", "fp16", 1)],
        "layouts",
    ),
)
def test_compressed_gradients(stage: int, precision: str, wire: str, stages: int):
    """The bytes follow the formulas, and the norm of the first step's gradients shows that they are averaged. Rounding
    to 16 bits changes it by less than 1 %, to 8 bits in a block by at most 2 * 16 / 254. Of top_k it is less.
    """
    name, ranks = "fp32: llama on dp2, ZeRO 2, four micro-batches", 2 * stages
    case = next(case for case in cases() if case.name == name)
    parallel = {**case.values.get("parallel", {}), "pipeline": stages}
    values = {**case.values, "zero": {"stage": stage}, "precision": precision, "parallel": parallel}
    compressed = {**values, "parallel": {**parallel, "communication": {"compress": {"data": wire}}}}
    predicted = [predict(resolve(compressed, ranks=ranks), ranks, rank, weighted=True) for rank in range(ranks)]
    for own, found in zip(predicted, run(ranks, counted, compressed, ranks)):
        assert own.step.rows() == found[-1]
        reduced = {row[4] for row in found[-1] if row[0] == "backward" and row[2] == "data"}
        assert reduced == {"all_to_all", "all_gather"}
    plain, norm = (run(ranks, first_norm, each, ranks)[0] for each in (values, compressed))
    bound = {"int8_block": 32 / 254, "top_k": 1.0}.get(wire, 0.01)
    assert plain * (1 - bound) <= norm <= plain * (1 + bound) and norm > 0


@pytest.mark.parametrize(
    ("axis", "wire", "name"),
    toured(
        [
            ("tensor", "int8_block", "fp32: llama on tp2, sequence parallel"),
            ("tensor", "fp16", "fp32: olmo2 on tp2, ZeRO 0, recomputation"),
            ("pipeline", "int8_block", "fp32: gpt2 on tp2 · pp2, sequence parallel, recomputation"),
            ("pipeline", "bf16", "fp32: llama on pp2"),
            ("pipeline", "int8_block", "fp32: neox on pp2, ZB-V"),
        ],
        "layouts",
    ),
)
def test_compressed_activations(axis: str, wire: str, name: str):
    """As above: the bytes, which are fewer only on that axis, and the norm of the first step's gradients."""
    case = next(case for case in cases() if case.name == name)
    values = {**case.values, "parallel": {**case.values["parallel"], "communication": {"compress": {axis: wire}}}}
    predicted = [
        predict(resolve(values, ranks=case.ranks), case.ranks, rank, weighted=True) for rank in range(case.ranks)
    ]
    for own, found in zip(predicted, run(case.ranks, counted, values, case.ranks)):
        assert own.step.rows() == found[-1] and (own.step + own.first).rows() == found[0]
    whole = predictions(case)
    for own, plain in zip(predicted, whole):
        sizes, before = (each.step.by("group") for each in (own, plain))
        assert {group for group in sizes if sizes[group] != before[group]} == {(axis,)}
        assert sent_on(axis, own.step) < sent_on(axis, plain.step)
    plain, norm = (run(case.ranks, first_norm, each, case.ranks)[0] for each in (case.values, values))
    assert norm == pytest.approx(plain, rel=0.05 if wire == "int8_block" else 0.01) and norm != plain


def sent_on(axis: str, tally: Tally) -> float:
    """Bytes that a rank sends there with rings."""
    return sum(wire_bytes(call.operation, call.ranks, size) for call, _, size in tally if call.group == axis)


def first_norm(values: dict, ranks: int) -> float:
    """Of the gradients of the first step."""
    config, engine = runs.start(values, ranks)
    data = engine.mesh.data
    found = engine.step(runs.local_batch(config, 0, data.rank, data.size), config.optimizer.lr).grad_norm
    return float(found)
