"""Checkpoints behind URLs, and tasks whose data are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.evaluation.arguments import checkpoint_problems
from tests.eval_tasks.models import settings, write_checkpoint
from tests.workers import run as on_ranks

TASKS = ["--tasks", "deepy_induction,deepy_copy", "--limit", "3"]
HUB = {
    "task": "of_the_hub",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "a",
    "doc_to_target": "b",
    "metric_list": [{"metric": "acc"}],
}


def evaluate(folder: str, words: list[str], uploaded: str | None) -> dict | str:
    """evaluate.py in this worker, whose memory:// is its own: the results, or what it refuses."""
    import torch

    from megatron.checkpoint import SOLO, CheckpointError
    from megatron.checkpoint.save.transfer import upload
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.evaluation import harness
    from megatron.evaluation.arguments import parse
    from megatron.evaluation.main import run
    from megatron.evaluation.select import TaskError
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.world import World

    config = combine(
        [ConfigSource(settings("gpt_neox", Path(folder)))], ranks=1, check_inputs=False, name="small"
    ).config
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(config, 1))
    if uploaded:
        upload(Path(folder) / "checkpoints" / uploaded, "memory://bucket/run")
    output = Path(folder) / "found.json"
    try:
        run(config, parse([*words, "--output", str(output)]), World(torch.device("cpu"), mesh, SOLO, SOLO))
    except (CheckpointError, TaskError) as error:
        return str(error)
    found = harness.read(output)
    assert found is not None
    told = found["config"]["model_args"]
    assert Path(told["checkpoint"]).name == "step_00000007" and told["given"] == words[words.index("--checkpoint") + 1]
    return {"results": harness.numbers(found), "step": told["step"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("elsewhere")
    write_checkpoint("gpt_neox", made)
    return made


def test_a_checkpoint_behind_a_url_scores_what_it_does_here(folder):
    here = on_ranks(1, evaluate, str(folder), [*TASKS, "--checkpoint", "7"], None)[0]
    assert here["step"] == 7 and here["results"].keys() == {"deepy_induction", "deepy_copy"}
    for url in ("memory://bucket/run/step_00000007", "memory://bucket/run"):  # itself, or a folder with it
        found = on_ranks(1, evaluate, str(folder), [*TASKS, "--checkpoint", url], "step_00000007")[0]
        assert found == here
    said = on_ranks(1, evaluate, str(folder), [*TASKS, "--checkpoint", "memory://bucket/none"], None)[0]
    assert "memory://bucket/none" in said and "there is no checkpoint" in said


def test_a_protocol_that_nothing_speaks(folder):
    """Before any rank starts."""
    config = combine([ConfigSource(settings("gpt_neox", folder))], ranks=1, check_inputs=False, name="small").config
    (line,) = checkpoint_problems("nope://bucket/step_00000007", config, "a step")
    assert "nope://bucket" in line and "must be installed" in line and "s3fs" in line
    assert checkpoint_problems("memory://bucket/step_00000007", config, "a step") == []


def test_data_that_cannot_be_loaded(folder, tmp_path):
    (tmp_path / "hub.yaml").write_text(yaml.safe_dump(HUB))
    words = ["--tasks", "of_the_hub", "--include-path", str(tmp_path), "--checkpoint", "7"]
    said = on_ranks(1, evaluate, str(folder), words, None)[0]
    assert "the data of of_the_hub cannot be loaded" in said and "nowhere.jsonl" in said
    assert "benchmarks.py" in said
