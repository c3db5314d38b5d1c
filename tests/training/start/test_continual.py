"""Continual pretraining end to end: the runs of configs/continual/, smaller, on two corpora that differ in all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.registry import prepare
from megatron.data.token_file import TokenFileWriter
from tests.paths import ROOT
from tests.workers import run as on_ranks
from tools.continual import ContinualStage, draw, losses, stages, table, train

TOKENS, PEAK = 32, 1e-2
SMALL = (
    "model.hidden_size=32",
    "model.layers=(attention/mlp) x2",
    f"model.vocab_size={TOKENS}",
    "tokenizer.type=none",
    "tokenizer.path=null",
    "training.sequence_length=32",
    f"optimizer.lr={PEAK}",
    "evaluation.batches=2",
    "logging.console=quiet",
    "logging.every=1",
    "logging.curve=false",
    "training.micro_batch_size=8",
)


def corpus(path: Path, seed: int, successor: np.ndarray, documents: int) -> None:
    """Documents in which a token is mostly followed by its successor: entropy about 0.6 nats."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(path, np.uint16) as writer:
        for _ in range(documents):
            tokens = [int(random.integers(TOKENS))]
            while len(tokens) < 200:
                tokens.append(int(successor[tokens[-1]] if random.random() < 0.9 else random.integers(TOKENS)))
            writer.append(np.array(tokens, np.uint16))


def job(folder: str, words: tuple[str, ...]) -> None:
    """One run on this worker, with paths seen from `folder`."""
    import torch

    from megatron.checkpoint import SOLO
    from megatron.config import load, to_yaml
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.run import run_training
    from megatron.training.world import World
    from megatron.worker.place import WorkerEnvironment

    before = os.getcwd()
    os.chdir(folder)
    try:
        files, overrides = [w for w in words if w.endswith(".yml")], [w for w in words if not w.endswith(".yml")]
        resolved = load(files, overrides, ranks=1)
        prepare_deepspeed(torch.device("cpu"))
        mesh = Mesh.build(Layout.of(resolved.config, 1))
        place = WorkerEnvironment(config_text=to_yaml(resolved))
        run_training(resolved.config, place, World(torch.device("cpu"), mesh, SOLO, SOLO))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ContinualStage]]:
    folder = tmp_path_factory.mktemp("continual")
    successor = {"a": np.roll(np.arange(TOKENS), 1), "b": np.roll(np.arange(TOKENS), 7)}
    for which, prefix in (("a", "data/quickstart/"), ("b", "data/continual/english_")):
        corpus(folder / f"{prefix}train", 1, successor[which], 80)
        corpus(folder / f"{prefix}validation", 2, successor[which], 10)
    every = [ContinualStage(each.name, each.words, each.steps, folder / each.folder) for each in stages(ROOT, 2, SMALL)]
    said: list[str] = []
    train(every, lambda stage: on_ranks(1, job, str(folder), stage.words), said.append)
    assert not said
    train(every, lambda stage: pytest.fail(f"{stage.name} was trained again"), said.append)
    assert len(said) == len(every)
    return folder, every


def rates(stage: ContinualStage) -> dict[int, float]:
    lines = [json.loads(line) for line in (stage.folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["lr"] for line in lines if "lr" in line}


def infinite(step: int, steps: int | None, decay: int) -> float:
    """Warmup of 10 steps, cosine cooldown of 30 to half the peak, constant, exponential annealing to 5 %."""
    if step < 10:
        return PEAK * step / 10
    if step < 40:
        return PEAK * (0.75 + 0.25 * math.cos(math.pi * (step - 10) / 30))
    left = steps - step if steps else decay
    return PEAK * 0.5 * 10 ** -(max(decay - left, 0) / decay)


@pytest.mark.tour
def test_the_infinite_schedule_goes_on_and_is_annealed_from_its_constant_phase(finished) -> None:
    runs = {stage.name: stage for stage in finished[1]}
    for name, begin, end, steps in (("a", 0, 100, None), ("annealed", 100, 120, 120), ("infinite", 100, 150, 150)):
        found = rates(runs[name])
        assert sorted(found) == list(range(begin, end))
        for step, rate in found.items():
            assert rate == pytest.approx(infinite(step, steps, 20), rel=1e-12), (name, step)


@pytest.mark.tour
def test_rewarming_begins_a_schedule_of_its_own(finished) -> None:
    found = rates(next(stage for stage in finished[1] if stage.name == "b"))
    assert [found[step] for step in range(4)] == pytest.approx([PEAK * share for share in (0, 1 / 3, 2 / 3, 1)])
    assert found[29] < 0.06 * PEAK


@pytest.mark.tour
def test_weights_are_handed_on_exactly(finished) -> None:
    values = losses(finished[1])
    for name in ("b", "replay"):
        for which in ("a", "b"):
            assert values[name][which][0] == values["annealed"][which][-1]


@pytest.mark.tour
def test_replay_keeps_what_was_learned(finished) -> None:
    values = losses(finished[1])
    last = {name: {which: points[-1][1] for which, points in sets.items()} for name, sets in values.items()}
    assert last["annealed"]["a"] < 1.5 < math.log(TOKENS) < last["annealed"]["b"]
    for name in ("b", "replay", "infinite"):
        assert last[name]["b"] < 1.5
    forgotten = {name: last[name]["a"] - last["annealed"]["a"] for name in ("b", "replay", "infinite")}
    assert forgotten["b"] > 2
    assert max(forgotten["replay"], forgotten["infinite"]) < 0.9 * forgotten["b"]


@pytest.mark.tour
def test_the_picture_and_the_table(finished, tmp_path: Path) -> None:
    values = losses(finished[1])
    draw(values, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert [values[name]["a"][-1][0] for name in ("annealed", "b", "replay", "infinite")] == [120, 150, 150, 150]
    rows = table(values).splitlines()[2:]
    assert [float(row.split("|")[-2]) for row in rows] == pytest.approx(
        [values[name]["b"][-1][1] for name in ("annealed", "b", "replay", "infinite")], abs=6e-4
    )


def test_each_seed_has_its_folder() -> None:
    plain, every = ({each.name: each for each in stages(ROOT, 2, SMALL, seed)} for seed in (None, 5))
    for name, stage in every.items():
        assert (
            stage.folder == Path("runs/continual/seed_5") / name and plain[name].folder == Path("runs/continual") / name
        )
        assert "training.seed=5" in stage.words and not any("runs/continual/a/" in word for word in stage.words)
    assert every["annealed"].words[-len(SMALL) - 1] == (
        "checkpoint.resume=runs/continual/seed_5/a/checkpoints/step_00000100"
    )
    assert every["b"].words[-len(SMALL) - 1] == (
        "checkpoint.initialize_from=runs/continual/seed_5/annealed/checkpoints/step_00000120"
    )


def test_the_table_of_several_seeds() -> None:
    names = ("annealed", "b", "replay", "infinite")
    found = [{name: {"a": [(9, loss)], "b": [(9, 2 * loss)]} for name in names} for loss in (1.0, 2.0, 3.0)]
    assert table(*found).splitlines()[2] == "| A, annealed | 9 | 2.000 ± 1.000 | 4.000 ± 2.000 |"


def test_corpus_b_is_the_same_every_time(tmp_path: Path) -> None:
    made = [prepare("english", tmp_path / name, 0.08)["files"] for name in ("one", "two")]
    assert made[0]["train"]["sha256"] == made[1]["train"]["sha256"]
    texts = [json.loads(line) for part in made[0].values() for line in Path(part["path"]).read_text().splitlines()]
    assert len({each["text"] for each in texts}) == len(texts) > 50
    assert any(each["name"] == "topic assert" for each in texts) and any(each["name"] == "torch" for each in texts)
    assert prepare("english", tmp_path / "one", 0.08)["kept"]
