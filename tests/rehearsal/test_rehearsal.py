"""Rehearsals equal real runs: counted on gloo ranks with real tensors, and by formulas."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config import resolve
from megatron.config.arithmetic.pipelines import by_table
from megatron.config.optimizer_kind import kinds_inside
from megatron.engine.deepspeed.options import accumulation_steps
from megatron.model.costs.describe import totals
from megatron.model.costs.traffic import NotPredicted
from megatron.parallel.layout.layout import Layout
from megatron.plan.messages.predict import predict
from megatron.rehearsal.command import in_own_process, main
from megatron.rehearsal.rank import RankCounts, with_micro_batches
from megatron.rehearsal.report import document, kinds_of_ranks, memory, messages, parts, text
from megatron.rehearsal.storage_counter import ProgramPlace, StorageCounter
from tests.config.broken.extension import RELAYED
from tests.paths import ROOT
from tests.rehearsal.counted import counted
from tests.selection import toured
from tests.training.matrix import Case, cases, merged
from tests.workers import run

BOUND = 0.05  # of the peak, which is promised. Most agree to the byte
# Small, since a run's buckets are larger than all else in models of a few thousand parameters.
BUCKETS = {"zero": {"bucket_size": 2000}}

OFTEN = {
    "fp32: llama on one, ZeRO 0",
    "bf16: llama on dp2, ZeRO 1, four micro-batches",
    "fp32: state space on tp2, sequence parallel, selective recomputation",
    "fp32: gpt2 on tp2 · pp2, sequence parallel, recomputation",
    "bf16: moe on dp2 · ep2, ZeRO 1, four micro-batches",
    "fp32: rwkv4 on cp4, ZeRO 2, selective recomputation",
    "fp32: gpt2 on pp2 · dp2, ZB-V, ZeRO 3 gathered once",
}
# A rehearsal of owners of whole matrices is refused: they are agreed on by messages. Outside optimizers have them too.
ELEMENTWISE = {name for name, kind in kinds_inside().items() if not kind.whole_matrices}
CASES = {case.name: case for case in cases() if case.values["optimizer"]["type"] in ELEMENTWISE}


def rehearsed(case: Case) -> dict[int, RankCounts]:
    """One rank of each kind, and the last."""
    config = resolve(merged(case.values, BUCKETS), ranks=case.ranks)
    ranks = {*kinds_of_ranks(config, Layout.of(config, case.ranks)), case.ranks - 1}
    return {rank: in_own_process(config, case.ranks, rank) for rank in sorted(ranks)}


def same_stage(layout: Layout, rank: int, other: int) -> bool:
    return layout.coordinates(rank).pipeline == layout.coordinates(other).pipeline


@pytest.mark.parametrize(
    "name", toured(pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in CASES)
)
def test_memory_and_flops_are_those_of_a_real_run(name):
    case = CASES[name]
    real = run(case.ranks, counted, merged(case.values, BUCKETS), case.ranks)
    config = resolve(case.values, ranks=case.ranks)
    layout = Layout.of(config, case.ranks)
    seen = rehearsed(case)
    for rank, found in seen.items():
        wanted = real[rank]
        assert found.peak == pytest.approx(wanted.peak, rel=BOUND), f"rank {rank}"
        assert found.kept == pytest.approx(wanted.kept, rel=BOUND), f"rank {rank}"
        # Rehearsed tokens go to all experts alike. Real ones do not, but all are on some rank of the stage.
        stage = [each for other, each in enumerate(real) if same_stage(layout, rank, other)]
        compared = stage if layout.spreads_experts else [wanted]
        done = [sum(each.flops.values()) for each in compared]
        assert sum(found.flops.values()) == pytest.approx(sum(done) / len(done), rel=BOUND), f"rank {rank}"
        assert sum(each.size for each in found.allocations) == found.peak
        assert (found.checkpoint, found.fragments) == (wanted.checkpoint, wanted.fragments)
        if by_table(config.parallel, config.zero.stage):
            assert sorted(found.messages) == sorted(wanted.messages), f"rank {rank}"
    kinds = set(kinds_of_ranks(config, layout))
    most = max(each.peak for rank, each in seen.items() if rank in kinds)
    assert most == pytest.approx(max(each.peak for each in real), rel=BOUND)


@pytest.mark.parametrize(
    "name",
    [
        "fp32: llama on dp2, ZeRO 1, four micro-batches",
        pytest.param("fp32: llama on dp2, ZeRO 3, four micro-batches, recomputation", marks=pytest.mark.slow),
    ],
)
def test_no_later_step_needs_more(name):
    """A run of four steps keeps after the first what that one had not: flat gradients, what ZeRO 3 gathers ahead."""
    case = CASES[name]
    values = merged(case.values, BUCKETS)
    real = run(case.ranks, counted, values, case.ranks, None, 4)
    for rank, found in rehearsed(case).items():
        assert found.peak == pytest.approx(real[rank].peak, rel=BOUND), f"rank {rank}"


def test_often_names_cases():
    assert OFTEN <= CASES.keys()


def test_a_ledger_knows_what_lives_and_what_lived_at_the_peak():
    place = ProgramPlace("forward", "layers.0.mlp")
    with StorageCounter(lambda: place) as ledger:
        a = torch.zeros(1000)  # 4000 bytes
        b = torch.zeros(500)  # 2000
        a.view(10, 100).add_(1)  # nothing new
        c = a[:500] @ b  # 4, and 1000 FLOPs by no formula of torch's: a dot product is not counted
        del b
        d = torch.zeros(10)  # 40: after the peak
        ledger.mark(a, "weights")
        assert ledger.live == 4000 + 4 + 40
        assert ledger.peak == 6004
        assert sorted((each.size, each.part) for each in ledger.at_peak()) == [(4, ""), (2000, ""), (4000, "weights")]
        ledger.flops.clear()
        torch.zeros(3, 4) @ torch.zeros(4, 5)
        assert ledger.flops == {place: 2 * 3 * 4 * 5}
        del a, c, d
        shape = torch.zeros(1000, device="meta")  # has a storage of 4000 bytes that does not exist
        with FakeTensorMode():
            fake, noted = torch.zeros(1000), torch.zeros(1000, device="meta")
        assert shape.untyped_storage().nbytes() == noted.untyped_storage().nbytes() == 4000
        assert ledger.live == 4000  # `fake`, which stands for a tensor that would
        del fake
    assert ledger.live == 0


VALUES = {
    "model": {"layers": "(attention/mlp) x4", "hidden_size": 32, "vocab_size": 96, "attention": {"heads": 4}},
    "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 32},
    "precision": {"compute": "bf16", "accumulate": "fp32"},
    "data": {"synthetic": "copy"},
}


@pytest.fixture(scope="module")
def wide() -> tuple[dict, RankCounts]:
    """A rank of 16. Of them 4 share weights, 2 hold a stage's and 4 are replicas."""
    values = merged(VALUES, {"parallel": {"tensor": 2, "pipeline": 2}})
    return values, in_own_process(resolve(values, ranks=16), 16, 0)


def test_states_take_what_formulas_say(wide):
    """bf16 with ZeRO 1: 2 bytes of weights and 4 of gradients per parameter, and 4 + 8 over the data parallel ranks.
    Besides their sums in fp32 there are two gradients in bf16, the last one and the one before it."""
    values, seen = wide
    found, config = memory(seen.allocations), resolve(values, ranks=16)
    layout = Layout.of(config, 16)
    whole = seen.checkpoint["master"] * layout.data // 4  # parameters of the stage's tensor parallel rank
    assert layout.data == 4 and found["weights"] == pytest.approx(2 * whole, rel=0.01)
    assert 4 * whole <= found["gradients"] <= 1.01 * 4 * whole + 2 * 2 * (4 * 32 * 32 // 2)
    assert found["masters"] == pytest.approx(4 * whole / 4, rel=0.01)
    assert found["moments"] == pytest.approx(8 * whole / 4, rel=0.01)


def test_a_part_of_the_micro_batches_shows_all(wide):
    values, part = wide
    config = resolve(values, ranks=16)
    layout = Layout.of(config, 16)
    full = accumulation_steps(config, layout)
    assert part.micro_batches == 3 < full == 8
    whole = in_own_process(config, 16, 0, full)
    # every micro-batch's tokens and samples are there from the start: 17 and 1 numbers of 8 bytes
    assert whole.peak - part.peak == pytest.approx((full - 3) * 18 * 8, abs=64)
    said = [document(config, layout, {0: each}, None, 0.0)["rehearsed"][0] for each in (part, whole)]
    assert said[0]["flops"] == said[1]["flops"]
    assert said[0]["communication"] == said[1]["communication"]


def staged(stage: int, reduce: str = "micro_batch", **parallel) -> dict:
    """fp32 on two stages of two replicas."""
    training = {"global_batch_size": 16}
    zero = {"stage": stage, "reduce": reduce}
    values = merged(VALUES, {"training": training, "zero": zero, "parallel": {"pipeline": 2, **parallel}})
    return {**values, "precision": "fp32"}


def test_zero_3_of_stages_frees_their_weights():
    """Between steps a rank keeps no weights in fp32, where its part is the masters. In a step it has the weights of one
    stage, or of both of its stages."""
    seen = {}
    for stage, reduce in ((2, "micro_batch"), (3, "micro_batch"), (3, "step")):
        values = staged(stage, reduce, stages_per_rank=2, schedule="zbv")
        seen[stage, reduce] = in_own_process(resolve(values, ranks=4), 4, 0)
    second, each, once = seen.values()
    whole = 2 * second.checkpoint["master"]  # of two replicas
    assert second.kept - each.kept == second.kept - once.kept == whole
    weights = [memory(found.allocations)["weights"] for found in seen.values()]
    assert weights[0] == weights[2] == whole and whole / 3 < weights[1] < 2 * whole / 3


@pytest.mark.parametrize(
    ("stage", "reduce", "parallel"),
    [
        (2, "micro_batch", {"schedule": "zb_h1"}),
        (3, "micro_batch", {"schedule": "interleaved", "stages_per_rank": 2}),
        (3, "step", {"schedule": "zbv", "stages_per_rank": 2}),
    ],
)
def test_messages_of_a_schedule_scale_without_a_formula(stage: int, reduce: str, parallel: dict, monkeypatch):
    """From 4 of 8 micro-batches: how often a stage is reduced and gathered follows from the table."""
    config = resolve(staged(stage, reduce, **parallel), ranks=4)
    layout, zero_3_in_turn = Layout.of(config, 4), (stage, reduce) == (3, "micro_batch")
    for rank in (0, 2):
        few = predict(with_micro_batches(config, layout, 4), 4, rank).step
        whole = predict(config, 4, rank).step
        with monkeypatch.context() as patched:
            patched.setattr("megatron.rehearsal.report.predict", without_formula)
            seen = SimpleNamespace(messages=few.rows(), micro_batches=4)
            found, source = messages(config, layout, rank, seen)
        assert source == "counted over 4 of 8 micro-batches"
        for (*call, count, size), (*wanted, times, whole_size) in zip(
            sorted(found.rows()), sorted(whole.rows()), strict=True
        ):
            near = 0.05 if zero_3_in_turn and "all_gather" in call else 0  # stages of unequal sizes, in one sum
            assert call == wanted and (count, size) == pytest.approx((times, whole_size), rel=near, abs=0)


def without_formula(*_):
    raise NotPredicted("there is no formula")


def test_labels_with_weights_count():
    """Their sum cannot be read. A step without labels would do nothing."""
    values = merged(VALUES, {"objective": {"type": "goldfish"}, "training": {"global_batch_size": 2}})
    config = resolve(values, ranks=2)
    seen = in_own_process(config, 2, 0)
    wanted = totals(config).training_flops * config.training.sequence_length
    assert sum(seen.flops.values()) == pytest.approx(wanted, rel=0.1)


def test_one_rank_of_each_kind():
    values = merged(VALUES, {"model": {"layers": "(attention/mlp) x8"}, "parallel": {"pipeline": 4, "tensor": 2}})
    config = resolve(values, ranks=32)
    layout = Layout.of(config, 32)
    assert kinds_of_ranks(config, layout) == [0, 8, 24]
    assert [str(part) for part in parts(config)] == [
        "embedding, blocks 0-1",
        "blocks 2-3",
        "blocks 4-5",
        "blocks 6-7, head",
    ]


def test_ranks_that_share_sequences_differ(monkeypatch):
    """Where a package's kind passes states on, only ranks at a beginning can be rehearsed."""
    values = merged(VALUES, {"parallel": {"pipeline": 2, "context": 8, "tensor": 2}})
    config = resolve(values, ranks=32)
    layout = Layout.of(config, 32)
    found = [layout.coordinates(rank) for rank in kinds_of_ranks(config, layout)]
    assert [(at.pipeline, at.context) for at in found] == list(itertools.product((0, 1), (0, 1, 4, 7)))
    assert not any(at.data or at.tensor for at in found)
    monkeypatch.setattr("megatron.rehearsal.report.used_kinds", lambda model: [("", RELAYED, "")])
    assert kinds_of_ranks(config, layout) == [0, 16]


def test_the_report_adds_up(wide):
    values, seen = wide
    config = resolve(values, ranks=16)
    found = document(config, Layout.of(config, 16), {0: seen}, None, 1.0)
    said = found["rehearsed"][0]["memory"]
    assert sum(said["parts"].values()) == said["tensors"] == seen.peak
    assert found["checkpoint_bytes"] == 12 * found["parameters"]
    assert found["checkpoint_fragments"] == 16 * seen.fragments
    kept = found["rehearsed"][0]["memory"]["activations"]
    assert "layers.0.attention" in kept
    assert all(name.startswith(("embedding", "layers.0", "layers.1")) for name in kept)  # of the first stage
    shown = {part: size for part, size in said["parts"].items() if part.startswith("activations: ")}
    assert sum(kept.values()) == sum(shown.values()) - shown.get("activations: between layers and stages", 0)
    assert "most memory" in text(json.loads(json.dumps(found)))


def test_no_library_warns_of_tensors_without_values(capfd):
    words = ["--ranks=2", "--device=h100", str(ROOT / "configs" / "test" / "tiny_llama.yml"), "zero.stage=1"]
    assert main(words) == 0
    out, error = capfd.readouterr()
    assert "rehearsed rank 0 in " in out and not error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks=4", "--device=h10"], "must be one of a100"),
        (["--ranks=4", "--rank=1,9"], "must be ranks of the run, 0 to 3"),
        (["--ranks=6"], "must be a multiple of tensor"),
    ],
)
def test_mistakes_are_told(words, said, capsys):
    layout = ["parallel.tensor=4", "training.global_batch_size=16"]
    assert main([*words, str(ROOT / "configs" / "test" / "tiny_llama.yml"), *layout]) == 2
    out, error = capsys.readouterr()
    assert said in error and "fix:" in error and not out
