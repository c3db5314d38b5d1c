"""Texts that a model recites: scores as transformers' greedy text gives them, on layouts, in a job that stops and
continues."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config import load
from megatron.evaluation.memorisation import summary
from megatron.evaluation.memorisation.summary import predict, summary_of
from tests.data.make import write_documents
from tests.eval_tasks.models import LENGTH, SIZE, settings, write_checkpoint
from tests.eval_tasks.test_harness import LAYOUTS
from tests.paths import ROOT
from tests.training.test_run import job as train
from tests.workers import run as on_ranks

CONTEXT, CONTINUATION = 8, 12


def recitals(folder: Path, rows: list[tuple[int, ...]], ranks: int, layout: dict) -> list:
    """Of rows, by the model of a checkpoint on a layout."""
    import torch

    from megatron.checkpoint import SOLO, GroupCommunicator, open_checkpoint
    from megatron.config import resolve
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.evaluation.memorisation.main import recite
    from megatron.evaluation.scoring import Scorer
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.start.resume import initialize
    from megatron.training.world import World

    device = torch.device("cpu")
    config = resolve({**settings("gpt_neox", folder), **layout}, ranks=ranks)
    prepare_deepspeed(device)
    mesh = Mesh.build(Layout.of(config, ranks))
    engine = build_engine(config, mesh, device, values=False)
    communicator = SOLO if ranks == 1 else GroupCommunicator()
    world = World(device, mesh, communicator, communicator)
    initialize(open_checkpoint(folder / "checkpoints" / "step_00000007"), world, engine)
    scorer = Scorer(config, engine, mesh, device, texts=2)
    return [recite(scorer, rows, CONTEXT, scores=scores) for scores in (True, False)]


@pytest.fixture(scope="module")
def recited(tmp_path_factory):
    """A checkpoint. Rows that its greedy text agrees with more and less, and the share of each that is right, as
    transformers' own `generate` has it."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron.checkpoint import open_checkpoint
    from megatron.checkpoint.hf.export import export

    folder = tmp_path_factory.mktemp("recited")
    export(open_checkpoint(write_checkpoint("gpt_neox", folder)), folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    draw, rows, shares = torch.Generator().manual_seed(5), [], []
    for wrong in ((), (), (CONTINUATION - 1,), (4,), (0, 7), tuple(range(CONTINUATION))):
        context = torch.randint(1, SIZE, (1, CONTEXT), generator=draw)
        made = model.generate(
            context, do_sample=False, max_new_tokens=CONTINUATION, min_new_tokens=CONTINUATION, eos_token_id=None
        )
        row = made[0].tolist()
        for place in wrong:
            row[CONTEXT + place] = (row[CONTEXT + place] + 1) % SIZE
        rows.append(tuple(row))
        shares.append(1.0 - len(wrong) / CONTINUATION)
    return folder, rows, shares


@pytest.mark.parametrize("layout", ["one", "dp2, ZeRO 3", "tp2 · pp2"])
def test_scores_are_those_of_transformers_greedy_text(layout, recited):
    folder, rows, shares = recited
    for whole, flags in on_ranks(LAYOUTS[layout][0], recitals, folder, rows, *LAYOUTS[layout]):
        assert [each.score for each in whole] == pytest.approx(shares)
        assert [each.extractable for each in whole] == [share == 1.0 for share in shares]
        assert [each.score for each in flags] == [1.0 if share == 1.0 else None for share in shares]
        assert [each.extractable for each in flags] == [each.extractable for each in whole]


CONFIG = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 8, sequence_length: 24, global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 0.01}
tokenizer: {type: none}
data: {train: [{path: FOLDER/rows}], order: stream}
checkpoint: {every: 4}
evaluation: {at_end: false}
logging: {console: quiet, curve: false}
"""
LAYOUT = ["parallel.tensor=2", "training.global_batch_size=8"]


def extract(folder: str, ranks: int, words: list[str], overrides: list[str], part: int = 16) -> str:
    """extract.py on this worker's ranks. Its refusal, or None."""
    import torch

    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.data.errors import DataError
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.evaluation.memorisation.arguments import parse
    from megatron.evaluation.memorisation.main import run
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.world import World

    config = load([f"{folder}/tiny.yml"], [f"run.dir={folder}/run", *overrides], ranks=ranks).config
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(config, ranks))
    talk = SOLO if ranks == 1 else GroupCommunicator()
    before, summary.PART = summary.PART, part
    try:
        run(config, parse(words), World(torch.device("cpu"), mesh, talk, talk))
    except (summary.ResultError, DataError) as error:
        return str(error)
    finally:
        summary.PART = before
    return ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_documents(folder / "rows", np.random.default_rng(0).integers(1, 64, (40, 25)).tolist())
    (folder / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(folder)))
    on_ranks(1, train, str(folder), 1)
    return folder


def rows_of(folder: Path) -> list[dict]:
    return [row for batch in summary.batches(folder, summary.SCHEMA.names) for row in batch.to_pylist()]


def test_a_job_on_two_layouts_that_goes_on(trained):
    """Places and documents equal the run's provenance. A part that is lost is made again, and only that one."""
    from megatron.data.provenance import Provenance, run_config

    words = ["--steps", "0:8", "--context", "4", "--continuation", "3", "--all-checkpoints"]
    assert on_ranks(1, extract, str(trained), 1, words, [])[0] == ""
    results = [trained / "run" / "memorisation" / f"step_{step:08d}" for step in (4, 8)]
    rows = rows_of(results[1])
    expected = [(step, each) for step in range(8) for each in Provenance(run_config(trained / "run")).step(step)]
    assert [(row["sample"], row["step"], row["sequence"], row["document"]) for row in rows] == [
        (each.number, step, each.index, each.pieces[0].document) for step, each in expected
    ]
    assert all(row["extractable"] == (row["score"] == 1.0) for row in rows)
    parts = sorted(results[1].glob("part_*.parquet"))
    assert len(parts) == 4
    parts[2].unlink()
    kept = [(path, path.stat().st_mtime_ns) for path in (*parts[:2], parts[3])]
    assert on_ranks(2, extract, str(trained), 2, words, LAYOUT) == ["", ""]
    assert [(path, path.stat().st_mtime_ns) for path in (*parts[:2], parts[3])] == kept
    again = rows_of(results[1])
    assert [{**row, "log_likelihood": None} for row in again] == [{**row, "log_likelihood": None} for row in rows]
    assert [row["log_likelihood"] for row in again] == pytest.approx([row["log_likelihood"] for row in rows], rel=1e-4)
    summary = summary_of(results[0])
    assert summary.sequences == 64 and summary.seen[0] == summary.unseen[0] == 32
    assert summary.mean_score == pytest.approx(sum(row["score"] for row in rows_of(results[0])) / 64)


@pytest.mark.parametrize(
    ("words", "overrides", "said"),
    [
        (["--context", "5", "--continuation", "3"], [], "context was 4 and is 5"),
        (["--context", "4", "--continuation", "3"], ["training.global_batch_size=4"], "must have the data of the"),
        (["--context", "4", "--continuation", "3"], ["data.seed=3"], "the data order differs"),
    ],
)
def test_other_results_and_other_data_are_refused(words, overrides, said, trained):
    where = trained / "run" / "memorisation"
    options = ["--steps", "0:8", "--checkpoint", "8", *words]
    if not where.exists():
        assert (
            on_ranks(1, extract, str(trained), 1, [*options[:4], "--context", "4", "--continuation", "3"], [])[0] == ""
        )
    before = {path: path.read_bytes() for path in where.rglob("*.*")}
    assert said in on_ranks(1, extract, str(trained), 1, options, overrides)[0]
    assert {path: path.read_bytes() for path in where.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the following arguments are required: --steps"),
        (("--steps", "5"), "must be FIRST:END"),
        (("--steps", "5:5"), "with at least one step"),
        (("--steps", "0:9:0"), "must be FIRST:END"),
        (("--steps", "0:8", "--context", "0"), "--context is 0: it must be at least 1"),
        (("--steps", "0:8", "--context", "60"), "must fit the 65 tokens of a sequence"),
        (("--steps", "0:11"), "--steps must end at 10 or before"),
        (("--steps", "0:8", "--samples", "9"), "--samples must be at most 8"),
        (("--steps", "0:8", "--checkpoint", "nowhere"), "--checkpoint nowhere does not exist"),
        (("--steps", "0:8", "--checkpoint", "3", "--all-checkpoints"), "exclude each other"),
        (("--steps", "0:8"), "train the run first"),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(words, said, tmp_path):
    from megatron.config import resolve
    from megatron.evaluation.memorisation.arguments import before_start

    assert LENGTH == 64
    if said != "train the run first":
        (tmp_path / "checkpoints").mkdir()
    found = before_start(words, resolve(settings("gpt_neox", tmp_path)))
    assert len(found) == 1 and said in found[0], found


def test_a_recital_fits_the_sequences_of_its_steps(tmp_path):
    from megatron.config import resolve
    from megatron.evaluation.memorisation.arguments import before_start

    (tmp_path / "checkpoints").mkdir()
    values = settings("gpt_neox", tmp_path)
    values["training"]["sequence_schedule"] = [{"until": 4, "sequence_length": 32}]
    config = resolve(values)
    assert before_start(("--steps", "4:8"), config) == []
    (problem,) = before_start(("--steps", "3:8"), config)
    assert "32 + 32 tokens: they must fit the 33 tokens of a sequence of these steps" in problem


def written(folder: Path, flags: dict[int, bool], **facts) -> Path:
    job = summary.RecitationJob("c", 10, (0, 4, 1), 4, 32, 32, True, "fp32")
    summary.begin(folder, job)
    if facts:
        (folder / summary.JOB).write_text(json.dumps({**summary.read_job(folder), **facts}))
    rows = [
        {"sample": sample, "step": sample // 4, "sequence": sample % 4, "source": "s", "documents": 1}
        | {"extractable": flag, "score": 1.0 if flag else 0.9 if sample % 2 else 0.25, "log_likelihood": -1.0}
        for sample, flag in flags.items()
    ]
    summary.write_part(folder, 0, rows[:3])
    summary.write_part(folder, 1, rows[3:])
    return folder


def test_precision_and_recall_by_hand(tmp_path, capsys):
    """Over what both have: 1 is recited by both, 2 only by the early one, 3 and 4 only by the late one."""
    early = written(tmp_path / "early", {0: True, 1: True, 2: True, 3: False, 4: False, 5: False})
    late = written(tmp_path / "late", {1: True, 2: False, 3: True, 4: True, 5: False, 6: True})
    found = predict(early, late)
    assert (found.sequences, found.hits, found.false_alarms, found.misses) == (5, 1, 1, 2)
    assert (found.precision, found.recall, found.false_positive_rate) == (1 / 2, 1 / 3, 1 / 2)
    summary = summary_of(early)
    assert summary.histogram == (0, 0, 1, 0, 0, 0, 0, 0, 0, 2) and summary.extractable == 3
    from tools.memorisation import main

    assert main([str(early), str(late), "--predict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["precision"] == 0.5
    assert main([str(early)]) == 0 and "3 of 6 (50.0000%) extractable" in capsys.readouterr().out
    other = written(tmp_path / "other", {1: True}, context=16)
    for words, said in (
        ([str(other), str(late), "--predict"], "the same --context"),
        ([str(ROOT)], "must be a folder"),
    ):
        assert main(words) == 2 and said in capsys.readouterr().err
