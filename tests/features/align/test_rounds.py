"""Rounds of reinforcement learning: what is drawn, on layouts, and after a kill."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron import api
from megatron.config import resolve
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.tokenizer import build_tokenizer
from megatron.decoding.sampling import choose_tokens
from megatron.features.align.hook import AlignHook
from megatron.features.align.problems import Problems, Prompt
from megatron.features.align.rollouts import advantages, await_round, next_level, path_of, read_round
from megatron.features.align.sampler import Drawn, Rule, Sampler
from megatron.features.align.verifier import Verdict
from megatron.testing.ranks import on_ranks
from megatron.testing.runs import train_on_ranks
from tests.paths import ROOT
from tests.selection import toured


def values(folder: Path, **align: Any) -> dict[str, Any]:
    own = {"environment": "addition", "rewards": [{"type": "tests.features.align.judges:digits"}], "group": 4}
    own |= {"tokens": 5, "stop": "\n", "workers": 1, "evaluate": 2, "problems": 4, **align}
    return {
        "run": {"dir": str(folder / "run")},
        "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 264, "attention": {"heads": 4}},
        "tokenizer": {"type": "bytes"},
        "objective": {"type": "policy", "options": {"loss": "grpo", "beta": 0.05, "correction": "clamp"}},
        "data": {"synthetic": "rollouts", "reset_attention_at_eod": True},
        "training": {
            **{"steps": 4, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 8},
            "weight_average": 1.0,
        },
        "optimizer": {"type": "sgd", "lr": 0.5, "weight_decay": 0.0},
        "evaluation": {"at_end": False},
        "logging": {"console": "quiet", "curve": False, "predictions": False, "every": 1},
        "align": own,
    }


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.tour
def test_runs_on_other_layouts_draw_the_same_texts(tmp_path):
    """With SGD, whose step is the gradient. A pipeline reads whole texts for each token, the others cached states."""

    def run(name: str, ranks: int, *overrides: str) -> tuple[list[list[float]], list[list[int]]]:
        folder = tmp_path / name
        records = train_on_ranks(ranks, values(folder), overrides)
        steps = [each for each in records if "loss" in each]
        names = ("objective_loss", "policy_kl", "grad_norm", "loss", "reward", "completion_tokens")
        config: Any = resolve(values(folder))
        texts = [one.completion for number in range(4) for one in read_round(path_of(config, number))]
        return [[each[key] for key in names] for each in steps], texts

    steps, texts = run("one", 1)
    assert len(steps) == 4 and len(texts) == 32 and any(step[2] > 0 for step in steps)
    assert (
        steps[0][1] == pytest.approx(0, abs=1e-6) and max(step[1] for step in steps) > 0
    )  # the reference is the start
    layouts = ("zero.stage=1", "zero.stage=3", "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2")
    for number, layout in enumerate(layouts):
        found, same = run(
            f"other{number}", 2, layout, *(["training.micro_batch_size=1"] if "pipeline" in layout else [])
        )
        assert same == texts, layout
        assert found == [pytest.approx(each, rel=5e-5, abs=2e-6) for each in steps], layout


@pytest.mark.tour
def test_experts_are_replayed_on_every_layout(tmp_path):
    """Two updates on a round: the second update's weights choose other experts, and the file's are used."""

    def run(name: str, ranks: int, replay: bool, *overrides: str) -> list[list[float]]:
        own = values(tmp_path / name, updates=2, evaluate=None)
        own["model"] |= {"layers": "attention/mlp attention/moe", "init": {"std": 0.3}}
        own["model"]["moe"] = {"experts": 8, "top_k": 2, "hidden_size": 16, "losses": {"balance": 0.0}}
        own["objective"]["options"] |= {"replay": replay}
        own["optimizer"]["lr"] = 3.0
        records = train_on_ranks(ranks, own, overrides)
        return [[each[key] for key in ("objective_loss", "grad_norm")] for each in records if "loss" in each]

    steps, without = run("one", 1, True), run("without", 1, False)
    assert steps[0] == without[0] and steps[1] != without[1]
    own: Any = resolve(values(tmp_path / "one", updates=2))
    one = read_round(path_of(own, 0))[0]
    assert one.routes(2).shape == (len(one.prompt) + len(one.completion) - 1, 2) and one.routes(2).max() < 8
    for number, layout in enumerate(("zero.stage=1", "parallel.tensor=2", "parallel.expert=2")):
        found = run(f"other{number}", 2, True, layout)
        assert found == [pytest.approx(each, rel=5e-5, abs=2e-6) for each in steps], layout


@pytest.mark.tour
def test_experts_of_the_sampler_are_replayed(tmp_path):
    """In fp32 on one process the decoder's choice is the trainer's, so rounds and steps equal R2's, on every layout. In
    a file with other experts the step differs: they are what the trainer uses."""

    def run(name: str, ranks: int, routes: str, *overrides: str) -> list[list[float]]:
        own = values(tmp_path / name, evaluate=None, routes=routes)
        own["model"] |= {"layers": "attention/mlp attention/moe", "init": {"std": 0.3}}
        own["model"]["moe"] = {"experts": 8, "top_k": 2, "hidden_size": 16, "losses": {"balance": 0.0}}
        own["objective"]["options"] |= {"replay": True}
        records = train_on_ranks(ranks, own, overrides)
        return [[each[key] for key in ("objective_loss", "grad_norm")] for each in records if "loss" in each]

    steps = run("trainer", 1, "trainer")
    found = [run("sampler", 1, "sampler"), *(run(f"two{at}", 2, "sampler", each) for at, each in enumerate(TWO_RANKS))]
    for each in found:
        assert each == [pytest.approx(step, rel=5e-5, abs=2e-6) for step in steps]
    experts = [
        [one.experts for one in read_round(path_of(resolve(values(tmp_path / name)), 0))]
        for name in ("trainer", "sampler", "two0", "two1")
    ]
    assert experts[0][0] and all(each == experts[0] for each in experts)


TWO_RANKS = ("zero.stage=1", "parallel.tensor=2")


def test_a_round_has_what_its_file_says(tmp_path):
    """Its numbers follow from the file. The step's columns and weights are the file's."""
    own = values(tmp_path)
    own["model"]["vocab_size"] = 257  # the tokenizer's, so that the sampler may choose all ids
    records = train_on_ranks(1, own)
    config: Any = resolve(own)
    path = path_of(config, 1)
    rollouts = read_round(path)
    step = next(each for each in records if each.get("step") == 1 and "loss" in each)
    assert step["reward"] == pytest.approx(np.mean([each.reward for each in rollouts]))
    assert step["sampler_difference"] == step["policy_change"] == 0.0 and step["reward_failures"] == 0
    assert [each["held_out"]["reward"] >= 0 for each in records if "held_out" in each] == [True] * 3
    ledger = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    digests = {each["round"]: each["sha256"] for each in ledger if each["event"] == "rollouts"}
    assert digests[1] == hashlib.sha256(path.read_bytes()).hexdigest() and sorted(digests) == [0, 1, 2, 3]
    batch = build_loader(config, data_rank=0, data_ranks=1).read(1)
    assert batch.loss_mask is not None
    for row, one in enumerate(rollouts):
        begin, end = len(one.prompt) - 1, len(one.prompt) + len(one.completion) - 1
        own = {name: each.flatten(0, 1)[row] for name, each in batch.columns.items()}
        assert batch.tokens.flatten(0, 1)[row, : end + 1].tolist() == one.prompt + one.completion
        assert own["old"][begin:end].tolist() == pytest.approx(one.old)
        assert own["advantage"][begin].item() == pytest.approx(one.advantage)
        assert batch.loss_mask.flatten(0, 1)[row].sum().item() == pytest.approx(1)
        assert (
            not batch.loss_mask.flatten(0, 1)[row, :begin].any() and not batch.loss_mask.flatten(0, 1)[row, end:].any()
        )
    with pytest.raises(DataError, match="was not drawn yet"):
        build_loader(config, data_rank=0, data_ranks=1).read(9)


def test_ratios_begin_at_1_for_every_kind_of_layer(tmp_path):
    """In bf16, where training passes read whole texts by other kernels. The second update has other weights."""
    own = values(tmp_path, evaluate=None, updates=2)
    kinds = "attention/mlp mla/mlp mamba/mlp mamba2/mlp gated_delta/mlp rwkv6/rwkv6_ffn rwkv7/mlp attention/moe"
    own["model"] |= {
        "layers": kinds,
        "mla": {"heads": 4, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
        "mamba": {"state_size": 4},
        "mamba2": {"head_dim": 16, "state_size": 16},
        "gated_delta": {"heads": 4, "key_dim": 4, "value_dim": 8},
        "rwkv6": {"head_dim": 8, "mix_rank": 4, "decay_rank": 8},
        "rwkv7": {"head_dim": 8, "decay_rank": 4, "rate_rank": 4, "value_rank": 4, "gate_rank": 8},
        "moe": {"experts": 4, "top_k": 2, "hidden_size": 16},
    }
    own["precision"] = {"compute": "bf16"}
    steps = [each for each in train_on_ranks(1, own) if "loss" in each]
    assert [each["sampler_difference"] for each in steps] == [0.0] * 4
    assert [each["policy_change"] == 0.0 for each in steps] == [True, False] * 2
    assert steps[0]["policy_kl"] == 0.0 and all(0.0 < each["policy_rounding"] < 0.1 for each in steps)
    assert all(each["grad_norm"] > 0.0 for each in steps if each["equal_groups"] < 1.0)


def test_ranks_read_the_round_of_rank_0_only(tmp_path):
    path = tmp_path / "round-000000.jsonl"
    with pytest.raises(DataError, match="all hosts must see rank 0's file"):
        await_round(path, "0", patience=0.0)
    path.write_text("{}\n")
    assert read_round(path) == ()
    await_round(path, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match="all hosts must see rank 0's file"):
        await_round(path, "0", patience=0.0)


def test_a_round_belongs_to_its_prompts(tmp_path):
    """Other prompts at the same path are another course of a run."""
    file = tmp_path / "prompts.jsonl"
    own: Any = resolve(values(tmp_path, environment=None, prompts=str(file), evaluate=None))
    digests = []
    for answer in (2, 2, 3):
        file.write_text(json.dumps({"prompt": "1+1=", "answer": answer}))
        digests.append(Problems(own, build_tokenizer(own.tokenizer)).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.tour
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path):
    """kill -9 after the second round's file is there and before the run has saved anything."""

    def start(folder: Path) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        own = values(folder)
        (folder / "a.json").write_text(json.dumps(own))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, ROOT / "align.py", folder / "a.json"], env=environment, stdout=subprocess.DEVNULL
        )

    def weights(folder: Path) -> list[str]:
        last = max((folder / "run/checkpoints").glob("step*"))
        return [hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(last.glob("*.safetensors"))]

    whole, broken = start(tmp_path / "whole"), start(tmp_path / "broken")
    second, deadline = tmp_path / "broken/run/rollouts/round-000001.jsonl", time.monotonic() + 240
    while not second.exists():
        assert broken.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    kept = second.read_bytes()
    assert start(tmp_path / "broken").wait(240) == 0 and whole.wait(240) == 0
    assert second.read_bytes() == kept
    folders = [tmp_path / each / "run/rollouts" for each in ("whole", "broken")]
    one, other = ([each.read_bytes() for each in sorted(folder.iterdir())] for folder in folders)
    assert one == other and len(one) == 4
    found = weights(tmp_path / "whole")
    assert found and found == weights(tmp_path / "broken")


@pytest.mark.tour
def test_rounds_behind_are_drawn_by_earlier_weights_and_resume(tmp_path):
    """`old` of round n is what the checkpoint of step max(0, n - 2) says, and no other. A stopped run ends equal."""

    def run(name: str, *overrides: str) -> list[bytes]:
        # A reward inside: to open a checkpoint that names another module is refused, and would be for later tests.
        judge = [{"type": "format", "options": {"pattern": ".*[a-p].*"}}]
        own = values(tmp_path / name, behind=2, evaluate=None, rewards=judge)
        own["objective"]["options"] = {"loss": "grpo"}
        own["model"]["vocab_size"] = 257
        own["checkpoint"] = {"every": 1}
        train_on_ranks(1, own, overrides)
        return [each.read_bytes() for each in sorted((tmp_path / name / "run/rollouts").iterdir())]

    whole = run("whole")
    assert len(whole) == 4
    for number in range(4):
        one = next(
            each
            for each in map(json.loads, whole[number].splitlines()[1:])
            if len(each["completion"]) == 5  # the more tokens, the more weights show
        )
        apart = []
        for step in range(4):
            model = api.open_model(tmp_path / f"whole/run/checkpoints/step_{step:08d}" if step else _initial(tmp_path))
            logits = model.logits(torch.tensor([one["prompt"] + one["completion"]]))[0].double().log_softmax(-1)
            places = range(len(one["prompt"]) - 1, len(one["prompt"]) + len(one["completion"]) - 1)
            scores = [float(logits[place, token]) for place, token in zip(places, one["completion"])]
            apart.append(max(abs(a - b) for a, b in zip(scores, one["old"])))
        assert apart[max(0, number - 2)] < 1e-5, (number, apart)
        assert all(each > 1e-4 for step, each in enumerate(apart) if step != max(0, number - 2)), (number, apart)
    run("stopped", "training.stop_at_step=1")
    assert run("stopped") == whole
    run("lost", "training.stop_at_step=2")
    (tmp_path / "lost/run/rollouts/round-000003.jsonl").unlink()
    with pytest.raises(Exception, match="must be there as this run has drawn it"):
        run("lost")


def _initial(folder: Path) -> Any:
    own = values(folder)
    own["model"]["vocab_size"] = 257
    return resolve(own)


def test_a_curriculum_follows_from_the_round_before(tmp_path):
    constant = [{"type": "tests.features.align.judges:constant"}]
    own = values(tmp_path, rewards=constant, difficulty=[1, 3], curriculum=0.7, evaluate=None)
    records = [each for each in train_on_ranks(1, own) if "loss" in each]
    heads = [json.loads(each.read_text().split("\n")[0]) for each in sorted((tmp_path / "run/rollouts").iterdir())]
    levels = [each["level"] for each in heads]
    assert levels[0] == 1 and levels[-1] > 1 and levels == sorted(levels)
    assert [step["difficulty"] for step in records] == levels
    for mean, level, wanted in (
        (1.0, 1, 2),
        (0.75, 2, 3),
        (0.0, 3, 2),
        (None, 4, 4),
        (0.0, 1, 1),
        (0.9, 5, 5),
        (0.7, 3, 3),
    ):
        assert next_level(mean, level, 0.7, 1, 5) == wanted
    assert next_level(None, 3, 0.0, 1, 5) == 3


def test_a_curriculum_counts_groups_that_were_replaced():
    """Otherwise it would see neither problems that are always solved nor ones that never are."""
    drawn = Drawn([1], [-1.0], True)

    def groups(numbers: Any, level: int) -> list[Any]:
        rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 0.0)}
        found = [(Prompt((5,), "", {"difficulty": level - n % 2}), rewards[n]) for n in numbers]
        return [(prompt, [drawn] * 2, [Verdict(each) for each in given]) for prompt, given in found]

    own = SimpleNamespace(group=2, dynamic_sampling=1, mask_truncated=False, routes="trainer")
    program: Any = SimpleNamespace(own=own, size=4, groups=groups, text=lambda _: "", scored=lambda found: found)
    texts, hardest = AlignHook.draw_round(program, 0, 2)
    assert [each.reward for each in texts] == [0.0, 1.0, 1.0, 0.0] and hardest == 1.0


def test_groups_of_equal_rewards_are_replaced(tmp_path):
    """Dynamic sampling draws further prompts. Where no reward differs, the update is 0 and weights stay."""
    records = train_on_ranks(1, values(tmp_path / "a", dynamic_sampling=3, evaluate=None))
    plain = train_on_ranks(1, values(tmp_path / "b", evaluate=None))
    equal = [[each["equal_groups"] for each in found if "loss" in each] for found in (records, plain)]
    assert sum(equal[0]) < sum(equal[1])
    constant = {"rewards": [{"type": "tests.features.align.judges:constant"}], "evaluate": None}
    flat = values(tmp_path / "c", **constant)
    flat["objective"] = {"type": "policy", "options": {"loss": "grpo"}}
    assert [each["grad_norm"] for each in train_on_ranks(1, flat) if "loss" in each] == [0.0] * 4


@pytest.mark.parametrize("seed", toured([1, 2, 3]))
def test_the_reward_rises(tmp_path, seed):
    """From random weights, with a dense reward. A mean over 5 rounds of 64 rewards in [0, 1] has a standard error of
    at most 0.028, so a rise of 0.2 is none of chance."""
    own = values(tmp_path, evaluate=None, texts=64, stop=None, tokens=4)
    own["objective"] = {"type": "policy", "options": {"loss": "grpo", "mean": "label"}}
    own["training"] = {
        "steps": 30,
        "sequence_length": 12,
        "micro_batch_size": 64,
        "global_batch_size": 64,
        "seed": seed,
    }
    own["optimizer"] = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.0}
    rewards = [each["reward"] for each in train_on_ranks(1, own) if "loss" in each]
    assert len(rewards) == 30 and np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2


# -- what is drawn -----------------------------------------------------------------------------------------------------


def draw_on_this_rank(own: dict[str, Any], cached: bool) -> tuple[list, list, list]:
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.evaluation.shared_contexts import Text
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config: Any = resolve(own)
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(config, 1))
    engine = build_engine(config, mesh, "cpu")
    sampler = Sampler(config, engine, mesh, torch.device("cpu"), texts=6)
    assert sampler.cached
    sampler.cached = cached
    prompts = [(65, 66, 67), (65, 66, 67), (70, 71), (65, 66, 67), (80,) * 5, (70, 71), (90, 91)]
    rule = Rule.of(3, tokens=8, finished=lambda ids: ids[-1] % 5 == 0, vocabulary=257)
    numbers = [9, 10, 4, 11, 2**40, 12, 7]
    drawn = sampler.draw(prompts, numbers, rule)
    alone = sampler.draw(prompts[3:4], numbers[3:4], rule)[0]
    assert alone.tokens == drawn[3].tokens
    texts = [Text((*prompt, *each.tokens), len(each.tokens)) for prompt, each in zip(prompts, drawn)]
    scores = sampler.log_probabilities(texts)
    logits = [engine.model.logits(torch.tensor([text.tokens[:-1]]))[0, -text.scored :].detach() for text in texts]
    exact = [
        each.double().log_softmax(-1)[range(text.scored), list(text.targets)].tolist()
        for each, text in zip(logits, texts)
    ]
    return [(each.tokens, each.log_p, each.ended) for each in drawn], scores, exact


def test_texts_do_not_depend_on_cache_or_company(tmp_path):
    """Both ways of drawing choose the same tokens. Log-probabilities equal the values for whole texts."""
    (one,) = on_ranks(1, draw_on_this_rank, values(tmp_path), True)
    (other,) = on_ranks(1, draw_on_this_rank, values(tmp_path), False)
    assert [each[0] for each in one[0]] == [each[0] for each in other[0]]
    for drawn, scores, exact in (one, other):
        for (tokens, log_p, ended), score, wanted in zip(drawn, scores, exact):
            assert score == pytest.approx(wanted, abs=1e-5)
            # the sampler excludes the ids that the tokenizer lacks, of 264
            assert log_p == pytest.approx(wanted, abs=0.1) and len(log_p) == len(tokens)
            assert ended == (tokens[-1] % 5 == 0) and not any(each % 5 == 0 for each in tokens[:-1])
    assert len({tuple(tokens) for tokens, *_ in one[0]}) > 4


def test_draws_have_the_distribution_of_the_model():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, -1)
    sampling = Rule.of(0, tokens=1, finished=bool, vocabulary=4).sampling
    ids, log_p = choose_tokens(logits, sampling, range(20000), [5] * 20000)
    wanted = logits[0].double().softmax(0)
    counts = np.bincount(ids, minlength=4) / 20000
    assert np.abs(counts[:4] - wanted.numpy()).max() < 5 * math.sqrt(0.25 / 20000)
    assert float(log_p[0]) == pytest.approx(float(wanted[ids[0]].log()))


def test_advantages():
    """The facts of one group of rewards 1, 0, 0.25, 1, by each formula."""
    rewards = np.array([[1.0, 0.0, 0.25, 1.0], [0.0, 0.0, 0.0, 0.0]])
    for kind, wanted in {
        "group": [0.848710013696, -1.091198589038, -0.606221438354, 0.848710013696],
        "max_rl": [7 / 9, -1, -5 / 9, 7 / 9],
        "leave_one_out": [7 / 12, -3 / 4, -5 / 12, 7 / 12],
        "mean": [0.4375, -0.5625, -0.3125, 0.4375],
        "reward": [1.0, 0.0, 0.25, 1.0],
    }.items():
        found = advantages(rewards, kind)
        assert found[0].tolist() == pytest.approx(wanted, rel=1e-11) and not found[1].any()
        if kind != "reward":
            assert not advantages(np.full((1, 3), 0.1), kind).any()  # their mean is not 0.1 in float64


def test_prompts_are_functions_of_their_number(tmp_path):
    config: Any = resolve(values(tmp_path))
    tokenizer = build_tokenizer(config.tokenizer)
    train, held = Problems(config, tokenizer), Problems(config, tokenizer, held_out=True)
    assert train(5) == Problems(config, tokenizer)(5)
    texts, others = {train(n).text for n in range(300)}, {held(n).text for n in range(300)}
    assert len(texts) > 50 and not texts & others
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{n}=", "answer": n}) for n in range(6)]
    file.write_text("\n".join(lines) + "\n")
    own = values(tmp_path, prompts=str(file), environment=None, held_out=str(file))
    found: Any = Problems(resolve(own), tokenizer)
    assert sorted(found(n).record["answer"] for n in range(6)) == list(range(6))
    assert [found(n).text for n in range(6, 12)] != [found(n).text for n in range(6)]
    file.write_text("\n".join([*lines, json.dumps({"prompt": "x" * 40})]))
    with pytest.raises(DataError, match="prompts.jsonl:7.*its prompt has 40 tokens, and must have 1 to 12"):
        Problems(resolve(own), tokenizer)
