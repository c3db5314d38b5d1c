"""Runs that diverge, and steps without labels, through the whole engine on several layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.checkpoint import Fragment, FragmentSpec
from megatron.checkpoint.save.store import Store
from megatron.checkpoint.save.writer import non_finite
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.report.ledger import read_ledger
from megatron.training.start.resume import divergence
from tests.selection import toured
from tests.training.runs import assemble, local_batch, portable, start
from tests.training.test_run import TINY, job
from tests.workers import run as on_ranks

LAYOUTS = {
    "one": (1, ()),
    "zero 1": (2, ("zero.stage=1",)),
    "zero 2": (2, ("zero.stage=2",)),
    "zero 3": (2, ("zero.stage=3",)),
    "tensor": (2, ("parallel.tensor=2", "zero.stage=0")),
    "pipeline": (2, ("parallel.pipeline=2", "zero.stage=1")),
}
# An update of about lr in each weight: finite losses and gradients before it, weights beyond every product after it.
WILD = (
    "optimizer.lr=1000",
    "optimizer.weight_decay=1.0e38",
    "schedule.warmup_steps=0",
    "schedule.type=constant",
    "model.dropout=0.0",
)


ODD = "has values that are infinite or no numbers"


def fragment(name: str, *values: float, state: str = "master", keep: bool = False) -> Fragment:
    tensor = LogicalTensor(name, (len(values),), Role.HIDDEN, keep_fp32=keep)
    return Fragment.of(FragmentSpec.whole(tensor, state), torch.tensor(values))


def test_what_is_broken_in_fragments():
    sound = [fragment("a", 3e38, -3e38), fragment("b", 0.0), fragment("c", 1e30, state="exp_avg_sq")]
    assert non_finite(sound) == [] and non_finite([]) == []
    nan, inf = float("nan"), float("inf")
    for value in (nan, inf, -inf):
        assert non_finite([*sound, fragment("d", 1.0, value, 2.0)]) == [
            "d (master) has values that are infinite or no numbers"
        ]
    assert non_finite([fragment("e", 7e4)], torch.float16) == [
        "e (master) has 7e+04, beyond the largest number of float16"
    ]
    assert non_finite([fragment("f", 7e4, keep=True), fragment("g", 7e4, state="exp_avg")], torch.float16) == []
    assert non_finite([fragment("h", 7e4)], torch.bfloat16) == []
    assert non_finite([fragment(str(n), nan) for n in range(9)])[-1] == "and 6 more"


def attempt(folder: str, ranks: int, number: int, *overrides: str) -> str:
    try:
        job(folder, ranks, *overrides, attempt=number)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


@pytest.mark.parametrize("name", toured(LAYOUTS))
def test_a_diverged_update_is_never_saved(name, tmp_path):
    """Three sound steps, then a learning rate that no weight survives: the checkpoint after it is not written."""
    ranks, layout = LAYOUTS[name]
    (tmp_path / "tiny.yml").write_text(TINY)
    on_ranks(ranks, job, str(tmp_path), ranks, *layout, "training.stop_at_step=2", "checkpoint.every=1")
    said = on_ranks(ranks, attempt, str(tmp_path), ranks, 0, *layout, *WILD, "checkpoint.every=1")
    assert all(text.startswith("NonFinite: ") for text in said), said
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[-1]["event"] == "error"
    found = Store(tmp_path / "run" / "checkpoints").resume("auto").checkpoint
    for name, state in found.stored:
        assert found.read(FragmentSpec.whole(found.tensors[name], state)).data.isfinite().all(), (found.path, name)


@pytest.mark.tour
def test_the_same_divergence_begins_further_back_and_then_stops(tmp_path):
    (tmp_path / "tiny.yml").write_text(TINY)
    on_ranks(1, job, str(tmp_path), 1, "training.stop_at_step=4", "checkpoint.every=1")
    folder, lines = tmp_path / "run" / "checkpoints", []
    for number in range(4):
        (said,) = on_ranks(1, poisoned, str(tmp_path), number)
        lines.append(said)
    starts = [entry["step"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl") if entry["event"] == "resume"]
    assert starts == [4, 4, 3]
    assert [line.partition(":")[0] for line in lines] == ["NonFinite"] * 3 + ["StartError"]
    assert "diverged 3 times at step 4" in lines[-1] and "not started again" in lines[-1]
    assert (folder / "superseded_1" / "step_00000004").is_dir()


def poisoned(folder: str, number: int) -> str:
    """A start whose step 4 has no finite loss, wherever it begins."""
    from megatron.engine.engine import PlainEngine

    step = PlainEngine.step

    def broken(self, batch, lr, *rest):
        result = step(self, batch, lr, *rest)
        return replace(result, loss=float("nan")) if batch.step == 4 else result

    PlainEngine.step = broken
    try:
        return attempt(folder, 1, number, "checkpoint.every=1")
    finally:
        PlainEngine.step = step


def events(*ends: tuple[int, int | None, str]):
    for begin, step, error in ends:
        yield {"event": "resume" if begin else "start", "step": begin}
        if step is not None:
            yield {"event": "error", "step": step, "error": error}
        yield {"event": "restart"}


@pytest.mark.parametrize(
    "ends, attempts, expected",
    [
        ([(0, 7, "NonFinite: a")], 1, (7, (0,))),
        ([(0, 7, "NonFinite: a"), (5, 7, "NonFinite: b")], 2, (7, (0, 5))),
        ([(0, 7, "NonFinite: a"), (5, 7, "NonFinite: b")], 1, (7, (5,))),  # the first is of an earlier command
        ([(0, 7, "NonFinite: a"), (5, 8, "NonFinite: b")], 2, (8, (5,))),
        ([(0, 7, "NonFinite: a"), (5, None, "")], 2, None),  # killed
        ([(0, 7, "NonFinite: a"), (5, 7, "OSError: disk")], 2, None),
        ([], 2, None),
    ],
)
def test_what_starts_have_in_common(ends, attempts, expected):
    found = divergence(events(*ends), attempts)
    assert (found and (found.step, found.starts)) == expected


# -- steps without labels ------------------------------------------------------------------------------------------

STEPS, EMPTY = 5, 2
VALUES = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 4}},
    "training": {"steps": STEPS, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 8},
    "optimizer": {"lr": 1e-2, "epsilon": 1e-3},  # a small one turns the rounding of a tiny gradient into a whole lr
    "schedule": {"warmup_steps": 1},
    "data": {"synthetic": "copy"},
}


def with_an_empty_step(ranks: int, overrides: dict) -> tuple[list, list]:
    """On every rank: five steps, the third without labels."""
    config, engine = start({**VALUES, **overrides}, ranks)
    data, losses = engine.mesh.data, []
    batches = [local_batch(config, step, data.rank, data.size) for step in range(STEPS)]
    batches[EMPTY] = replace(batches[EMPTY], loss_mask=torch.zeros_like(batches[EMPTY].loss_mask))
    for step, batch in enumerate(batches):
        before = portable(engine.state.fragments()) if step == EMPTY else None
        result = engine.step(batch, config.optimizer.lr)
        losses.append((bool(result.unlabelled), float(result.tokens)))
        if step + 2 < STEPS and config.zero.stage < 3:  # the others wait for the weight of labels in the step itself
            engine.foresee(batches[step + 2])
        if before is not None:
            for old, new in zip(before, portable(engine.state.fragments()), strict=True):
                assert (old[-1] == new[-1]).all(), "nothing changes"
    return losses, portable(engine.state.fragments())


@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (2, {"zero": {"stage": 1}}),
        (2, {"zero": {"stage": 3}}),
        (2, {"parallel": {"tensor": 2}}),
        (2, {"parallel": {"pipeline": 2}}),
    ],
    ids=["zero 1", "zero 3", "tensor", "pipeline"],
)
def test_a_step_without_labels_changes_nothing_on_any_layout(ranks, overrides):
    alone = on_ranks(1, with_an_empty_step, 1, {})
    cut = on_ranks(ranks, with_an_empty_step, ranks, overrides)
    assert [flags for flags, _ in alone[0][0]] == [step == EMPTY for step in range(STEPS)]
    for losses, _ in cut:
        assert [flags for flags, _ in losses] == [step == EMPTY for step in range(STEPS)]
    one, several = (assemble([fragments for _, fragments in found]) for found in (alone, cut))
    assert one.keys() == several.keys()
    for key, values in one.items():
        torch.testing.assert_close(torch.from_numpy(several[key]), torch.from_numpy(values), rtol=1e-4, atol=1e-6)
