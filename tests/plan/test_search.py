"""The search against the launcher's own rules, the step's counted bytes and the models' own sizes."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache

import pytest

from megatron.config import ConfigError, resolve
from megatron.config.arithmetic.pipelines import SCHEDULES
from megatron.config.source.layers import ConfigSource
from megatron.model.costs.describe import totals
from megatron.model.stack import build_model
from megatron.plan.advice import _schedules, document, remarks, text, why_not, why_nothing_fits
from megatron.plan.candidate import RECOMPUTE, Candidate, apply, layout_of, parse
from megatron.plan.devices import cluster, known_devices
from megatron.plan.memory import states
from megatron.plan.messages.predict import predict
from megatron.plan.search import Answers, Question
from megatron.plan.step import product_rate
from tests.paths import ROOT

LLAMA = {
    "model": {
        "layers": "(attention/mlp) x8", "hidden_size": 512, "vocab_size": 1000,
        "attention": {"heads": 8, "kv_heads": 4, "position": "rotary"}, "mlp": {"hidden_size": 1536, "gated": True},
        "norm": {"type": "rmsnorm"},
    },
    "training": {"steps": 100, "sequence_length": 512, "global_batch_size": 32},
    "precision": "bf16",
    "data": {"synthetic": "copy"},
}  # fmt: skip
MOE = {
    **LLAMA,
    "model": {
        **LLAMA["model"], "layers": "(attention/moe) x8",
        "moe": {"experts": 8, "top_k": 2, "hidden_size": 256, "gated": True},
    },
}  # fmt: skip


def question(values: dict, devices: int = 8, gpu: str = "h100", **more) -> Question:
    return Question.from_sources([ConfigSource(json.loads(json.dumps(values)))], cluster(devices, gpu, **more))


@cache
def _answered(moe: bool = False, length: int = 512) -> Answers:
    values = MOE if moe else LLAMA
    return question({**values, "training": {**values["training"], "sequence_length": length}}).answers()


@pytest.fixture(scope="module")
def llama() -> Answers:
    return _answered()


def legal(values: dict, choice: Candidate, devices: int) -> bool:
    own = {**values, **choice.values()}
    own["training"] = {**values["training"], **choice.values()["training"]}
    try:
        resolve(own, ranks=devices)
        return True
    except ConfigError:
        return False


@pytest.mark.parametrize("values", [LLAMA, MOE], ids=["llama", "moe"])
def test_structures_are_those_that_the_rules_allow(values):
    """Against every combination of sizes up to the devices, asked one by one."""
    devices, asked = 4, question(values, 4)
    found = asked.answers()
    shown = {(each.choice.tensor, each.choice.pipeline, each.choice.expert, each.choice.zero) for each in found.plans}
    expected = set()
    sizes = (1, 2, 4)
    for tensor in sizes:
        for pipeline in sizes:
            for expert in sizes if values is MOE else (1,):
                for zero in (0, 1, 2, 3):
                    choice = Candidate(tensor, pipeline, 1, expert, zero, sequence=tensor > 1)
                    if legal(values, choice, devices):
                        expected.add((tensor, pipeline, expert, zero))
    assert shown == expected
    for plan in found.plans:
        assert plan.share <= 1 and plan.mfu < 1
        assert plan.step.seconds == pytest.approx(sum(plan.step.parts.values()))
        assert legal(values, plan.choice, devices), plan.choice
        asked.resolved(plan.choice)


@pytest.mark.parametrize("values", [LLAMA, MOE], ids=["llama", "moe"])
def test_long_sequences_are_shared_with_and_without_matrices(values):
    """Against every combination on one stage, asked one by one. Ranks that share matrices need less room for these."""
    long = {**values, "training": {**values["training"], "sequence_length": 2**15}}
    asked = question(long, 4)
    found = list(asked.structures())
    expected = set()
    for context, expert, zero in itertools.product((2, 4), (1, 2, 4) if values is MOE else (1,), (1, 2, 3)):
        choice = Candidate(1, 1, context, expert, zero, folded=context)
        if legal(long, choice, 4):
            expected.add(choice)
    assert {each for each in found if each.folded > 1 and each.pipeline == 1} == expected and len(expected) == 4
    for choice in expected:
        alone = asked.judge(replace(choice, folded=1))
        shared = asked.judge(choice)
        assert shared.memory.total < alone.memory.total
        assert 0 < shared.step.seconds and asked.refusal(replace(choice, recompute="selective")) is not None


@pytest.mark.parametrize("values", [LLAMA, MOE], ids=["llama", "moe"])
def test_what_is_called_the_smallest_is(values):
    """Where nothing fits. Against every layout with micro-batches of one sample."""
    asked = question(values)
    none = asked.on(replace(asked.at, device=asked.at.device.model_copy(update={"memory": 0.001})))
    found, least = none.answers(), math.inf
    sizes = (1, 2, 4, 8)
    experts = sizes if values is MOE else (1,)
    for tensor, pipeline, expert, side in itertools.product(sizes, sizes, experts, (1, 2)):  # the heads allow 8 rows
        inner = tensor * pipeline * side
        for zero, sequence, mode in itertools.product((1, 2, 3), (False, True)[: 3 - side], RECOMPUTE):
            for depth in {1, max(1, 8 // inner)}:
                choice = Candidate(tensor, pipeline, 1, expert, zero, 1, mode, sequence, depth=depth, columns=side)
                if 8 % inner == 0 and none.refusal(choice) is None:
                    least = min(least, none.judge(choice).memory.total)
    assert not found.plans and found.closest.memory.total == least


def test_the_schedule_of_a_pipeline_is_the_fastest_that_is_legal():
    """Against each schedule with 1 to 4 stages per rank, asked one by one. The reason is a table of them."""
    asked, fixed = question(LLAMA), {"tensor": 1, "columns": 1, "pipeline": 4, "zero": 1, "recompute": "none"}
    plans, turns = asked.answers(fixed).plans, {}
    for schedule, each, micro in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 4)):
        choice = Candidate(1, 4, zero=1, micro_batch=micro, schedule=schedule, stages_per_rank=each)
        if schedule != "asynchronous" and legal(LLAMA, choice, 8):  # which is for CPUs
            turns[choice] = asked.judge(choice).turn
    best = plans[0]
    assert len(turns) >= 12 and best.turn == min(turns.values()) == turns[best.choice]
    assert best.choice.schedule not in ("1f1b", "dualpipe_v")
    rows = _schedules(asked, best)
    said = [row.split()[:2] for row in rows[2:] if row.startswith("  ")]
    assert [row.split(",")[0] for row in rows if row[0] != " "][1:] == [
        "Not tried: dualpipe_v",
        "Not tried: asynchronous",
    ]
    assert rows[0].startswith(f"Its schedule: {best.choice.schedule} with {best.choice.stages_per_rank} per rank")
    assert said[0] == [best.choice.schedule, str(best.choice.stages_per_rank)] and ["1f1b", "1"] in said
    assert all("dualpipe" not in word for word, _ in said)
    named = asked.answers({**fixed, "schedule": "dualpipe_v", "stages_per_rank": 2}).plans[0]
    assert named.choice.schedule == "dualpipe_v" and named.step.seconds >= best.step.seconds


@pytest.mark.parametrize(
    "name", ["tiny_llama", "tiny_mixtral", "tiny_zamba2", "tiny_rwkv7", "tiny_gpt2", "tiny_mamba2"]
)
def test_ranks_hold_the_whole_model(name):
    """Weights of one rank are all parameters. The stages' weights add up to them, with copies of tied tables."""
    asked = Question.of(
        [str(ROOT / "configs" / "test" / f"{name}.yml")], ["training.global_batch_size=8"], cluster(2, "h100")
    )
    whole = totals(asked.base).parameters
    places = range(asked.shapes.places)
    assert asked.shapes.weights(Candidate(), places).total == whole
    cut = Candidate(pipeline=2)
    parts = [asked.shapes.weights(cut, each).total for each in asked.shapes.held(apply(asked.base, cut, 2))]
    assert len(parts) == 2
    if name != "tiny_zamba2":  # both stages have its shared block
        model = asked.base.model
        assert sum(parts) == whole + (model.vocab_size * model.hidden_size if model.embedding.tied else 0)


def test_bytes_of_the_data_axis_are_those_that_are_counted(llama):
    """`engine.traffic` is held to counted messages. Reduced and gathered tensors have the same sizes here."""
    asked = llama.question
    for choice in (Candidate(tensor=2, sequence=True), Candidate(tensor=2, pipeline=2, sequence=True), Candidate()):
        resolved = asked.resolved(choice).config
        config = apply(asked.base, choice, 8)
        places = asked.shapes.held(config)[0]
        weights = asked.shapes.weights(choice, places)
        sizes = predict(resolved, 8, 0).step.by("phase", "group", "operation")
        unit = 2 * resolved.parallel.tensor * 8 * 2 * 2
        assert 0 <= sizes["backward", "data", "reduce_scatter"][1] - 4 * weights.total < 4 * unit
        assert 0 <= sizes["update", "data", "all_gather"][1] - 2 * weights.total < 2 * unit
        tensor = [
            (messages, size) for place in places for _, messages, size in asked.shapes.sends(place, choice, config)
        ]
        if choice.tensor > 1:
            count = config.training.accumulation
            rows = [each for key, each in sizes.items() if key[1] == "tensor" and key[0] != "update"]
            assert sum(size for _, size in rows) == count * sum(size for _, size in tensor)


def test_states_have_the_published_sizes():
    """Rajbhandari et al. 2020, with full sums in fp32 in place of gradients at ZeRO 1. ZeRO 3 shares everything."""
    asked = question(LLAMA)
    for zero, expected in ((1, 2 + 4 + 12 / 8), (2, 2 + 4 / 8 + 12 / 8), (3, (2 + 4 + 12) / 8)):
        choice = Candidate(zero=zero)
        config = apply(asked.base, choice, 8)
        weights = asked.shapes.weights(choice, range(asked.shapes.places))
        layout = layout_of(choice, 8)
        assert sum(states(config, layout, weights).values()) == pytest.approx(expected * weights.total)


@pytest.mark.parametrize(
    "units, tiles, share", [(108, 108, 1.0), (108, 109, 109 / 216), (132, 132, 1.0), (132, 133, 133 / 264)]
)
def test_waves_of_tiles(units, tiles, share):
    """One tile more than there are units takes a second wave (no smaller tile does better here than to 8 %)."""
    rate = product_rate(128 * tiles, 256, 4096, 1, units)
    assert rate == 1.0 if share == 1.0 else share <= rate < 1.0


def test_sizes_that_fill_no_access_cost():
    assert product_rate(8192, 50304, 4096, 1, 108) > product_rate(8192, 50257, 4096, 1, 108)


def test_what_does_not_fit_says_what_would():
    large = json.loads(json.dumps(LLAMA))
    large["model"] |= {"hidden_size": 16384, "layers": "(attention/mlp) x32"}
    large["model"]["attention"] |= {"heads": 128, "kv_heads": 128}
    large["model"]["mlp"]["hidden_size"] = 65536
    asked = question(large, 8)
    answers = asked.answers()
    assert not answers.plans and answers.closest is not None
    problem = why_nothing_fits(asked, answers, dict(known_devices()[0]))
    assert "no layout fits" in problem.rule and "states" in problem.rule or "gradients" in problem.rule
    (devices,) = [int(word) for word in problem.fix.split("devices")[0].split() if word.isdigit()]
    assert question(large, devices).answers().plans and not question(large, devices // 2).answers().plans


def test_a_batch_that_nothing_divides():
    odd = {**LLAMA, "training": {**LLAMA["training"], "global_batch_size": 7}}
    asked = question(odd, 32)
    answers = asked.answers()
    problem = why_nothing_fits(asked, answers, dict(known_devices()[0])) if not answers.plans else None
    assert problem is None or "global_batch_size" in f"{problem.rule}{problem.fix}"


def test_why_not(llama):
    asked = llama.question
    best = llama.plans[0].choice
    assert "it is the fastest" in why_not(asked, llama, {"tensor": best.tensor, "zero": best.zero})[0]
    assert "longer than the first" in why_not(asked, llama, {"tensor": 8})[0]
    assert "refuses" in why_not(asked, llama, {"tensor": 1, "pipeline": 2, "zero": 0})[0]
    assert "must be a multiple" in why_not(asked, llama, {"tensor": 3, "pipeline": 1})[0]


@pytest.mark.parametrize("values", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_why_not_ranks_that_share_matrices(values, pipeline):
    """They share sequences by themselves, and sequences are shared from a length on."""
    answers, wide = (_answered(values is MOE, length) for length in (512, 2**15))
    short, long = answers.question, wide.question
    named = {"tensor": 1, "pipeline": pipeline, "folded": 4}
    told = why_not(long, wide, named)
    assert "longer than the first" in told[0] or "it is the fastest" in told[0], told
    assert why_not(long, wide, {**named, "context": 4}) == told
    for asked in (named, {**named, "zero": 1}, {"folded": 4, "context": 4, "zero": 1}, {"context": 4}):
        assert "16,384 tokens or more, and these have 512" in why_not(short, answers, asked)[0]
    told = why_not(long, wide, {**named, "context": 2})
    assert "must be parallel.folded = 4" in told[0] and len(told) == 2


@pytest.mark.parametrize(
    "word",
    ["tensor", "tensor=x", "width=3", "zero=-1", "recompute=maybe", "tensor=0", "sequence=1"]
    + ["", ",", "tensor=" + 5000 * "9", "tensor=00", "tensor=²", "tensor=2,tensor=4"],
)
def test_broken_layouts(word):
    with pytest.raises(ConfigError, match="--layout = .*\n.*must be NAME=VALUE"):
        parse(word, "--layout")


def test_tensor_ranks_over_hosts_are_warned_of():
    asked = question(LLAMA, 8, hosts=4)
    plan = asked.judge(Candidate(tensor=4, sequence=True))
    assert any("cross the network" in each for each in remarks(asked, plan))
    apart, together = plan.step.parts["tensor"], question(LLAMA, 8).judge(plan.choice).step.parts["tensor"]
    assert apart > together


def test_pythons_work_at_zero_3_is_in_the_step():
    """By the tensors of the model itself, in each micro-batch. Not where the step takes longer, nor at ZeRO 2."""
    asked, each = question(LLAMA), known_devices()[0]["cpu"].host.gather * 1e-6
    tensors = sum(1 for _ in build_model(asked.base, device="meta").parameters())
    small = asked.judge(Candidate(zero=3, micro_batch=1))
    assert small.step.seconds == pytest.approx(4 * tensors * each) == pytest.approx(sum(small.step.parts.values()))
    assert len([remark for remark in remarks(asked, small) if "Python" in remark]) == 1
    wide = question({**LLAMA, "training": {**LLAMA["training"], "sequence_length": 2**15}})
    for plan in (wide.judge(Candidate(zero=3)), asked.judge(Candidate(zero=2))):
        assert plan.step.parts["host"] == 0 and not any("Python" in remark for remark in remarks(asked, plan))


def test_rows_of_a_table_differ_in_their_axes(llama):
    """Of sequences that ranks share, with and without matrices. Other messages do not say so."""
    long = _answered(length=2**15)
    lines = text(long, shown=1000).splitlines()
    first = next(number for number, line in enumerate(lines) if "pipeline" in line)
    header, rows = lines[first], lines[first + 1 : lines.index("", first)]
    axes = slice(header.index("tensor"), header.index("ZeRO") + len("ZeRO"))
    assert "folded" in header and len(rows) == len(long.distinct) == len({row[axes] for row in rows})
    assert sum(plan.choice.folded > 1 for plan in long.distinct) > 1
    assert "folded" not in text(llama, shown=100)


def test_answers_as_text_and_json(llama):
    shown = text(llama, price=2.0, named={"tensor": 8}, disk=1e6)
    assert "more than the disk's" in shown and "Why not" in shown and "zero: {stage:" in shown
    found = json.loads(json.dumps(document(llama, 2.0, {"tensor": 8})))
    best = found["plans"][0]
    hours = best["step"]["seconds"] * 100 / 3600 * 8
    assert best["cost"]["price"] == pytest.approx(2 * hours) and best["cost"]["energy"] == pytest.approx(hours * 7e-4)
    assert found["tokens"] == 100 * 32 * 512
    peak = 8 * 989e12
    assert best["mfu"] == pytest.approx(best["tokens_per_second"] * totals(llama.question.base).training_flops / peak)


def test_a_run_of_several_batch_sizes_costs_what_its_stages_cost() -> None:
    """Tokens and time against separate plans of each batch size. Layouts must divide each size."""
    stages = [{"until": 20, "global_batch_size": 8}, {"until": 50, "global_batch_size": 16}]
    asked = question({**LLAMA, "training": {**LLAMA["training"], "batch_schedule": stages}})
    assert asked.tokens == (20 * 8 + 30 * 16 + 50 * 32) * 512
    found = asked.answers()
    assert all(8 % (plan.choice.micro_batch * (8 // plan.choice.inner)) == 0 for plan in found.plans)
    for plan in found.plans[:3]:
        seconds = 0.0
        for size, steps in ((8, 20), (16, 30), (32, 50)):
            one = question({**LLAMA, "training": {**LLAMA["training"], "global_batch_size": size}})
            seconds += steps * one.judge(plan.choice).step.seconds
        assert asked.seconds(plan) == pytest.approx(seconds, rel=1e-12)
    told = document(found)
    assert told["tokens"] == asked.tokens and told["plans"][0]["cost"]["days"] == asked.seconds(found.plans[0]) / 86400
