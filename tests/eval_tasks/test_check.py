"""Evaluations that cannot work are refused before any rank starts, each with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from megatron.checkpoint.format import durable
from megatron.config import Config
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.data.manifest import Manifest
from megatron.evaluation import select
from megatron.evaluation.arguments import META, before_start, before_training, tokenizer_problems
from tests.eval_tasks.models import LENGTH, settings, tokenizer_file, write_checkpoint

TASK = {
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
SHORT, LONG = "Return the sum of ", "\N{SNOWMAN} " * 70  # a snowman is three tokens, and the model reads 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("check")
    write_checkpoint("gpt_neox", made)
    tasks = made / "tasks"
    tasks.mkdir()
    generation = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    for name, rows, more in (
        ("fits", [(SHORT, "a")], {}),
        ("long_context", [(SHORT, "a"), (LONG, "a")], {}),
        ("long_answer", [(SHORT, LONG)], {}),
        ("long_generation", [(SHORT, "a")], {**generation, "generation_kwargs": {"max_gen_toks": 64}}),
        ("cut_generation", [(LONG[:100], "a")], {**generation, "generation_kwargs": {"max_new_tokens": 60}}),
        ("examples", [(SHORT * 4, "a"), (SHORT * 4, "b"), (SHORT * 4, "c")], {"fewshot_split": "train"}),
    ):
        data = tasks / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
        write_task(tasks, name, data, more)
    write_task(tasks, "lost", tasks / "fitz.jsonl", {})
    write_task(tasks, "odd", tasks / "fits.jsonl", {"doc_to_text": "{{question.text.upper()}}"})
    write_task(tasks, "wrong", tasks / "fits.jsonl", {"doc_to_text": "{{question"})
    return made


def write_task(tasks: Path, name: str, data: Path, more: dict) -> None:
    values = {"task": name, "dataset_kwargs": {"data_files": str(data)}, **TASK, **more}
    (tasks / f"{name}.yaml").write_text(yaml.safe_dump(values))


def config(folder: Path, **sections) -> Config:
    values = {**settings("gpt_neox", folder), "evaluation": {}, **sections}
    return combine([ConfigSource(values)], ranks=1, check_inputs=False, name="small").config


def said(folder: Path, names: str, *options: str, **sections) -> list[str]:
    words = ["--tasks", names, "--include-path", str(folder / "tasks"), *options]
    return before_start(words, config(folder, **sections))


@pytest.mark.parametrize(
    ("names", "options", "parts"),
    [
        ("fits", (), ()),
        ("lost", (), ("the data of lost cannot be loaded", "Did you mean", "fits.jsonl?")),
        ("wrong", (), ("the task wrong cannot be used: TemplateSyntaxError", "Fix its file")),
        ("odd", (), ("the task odd cannot be used", "has no attribute 'text'", "Fix its file")),
        ("long_context", (), ("1 of 2 texts must fit the 64 tokens", "evaluation.truncate=true")),
        ("long_context", ("--limit", "1"), ()),
        ("long_context", ("--max-length", "500"), ()),
        ("long_answer", (), ("continuations must fit the 64 tokens", "Fix: --max-length")),
        ("long_generation", (), ("generates 64 tokens", "nothing is left for the prompt")),
        ("cut_generation", (), ("1 of 1 texts must fit the 64 tokens",)),
        ("examples", (), ()),
        ("examples", ("--few-shot", "2"), ("3 of 3 texts must fit", "fewer examples")),
        ("fits", ("--checkpoint", "8"), ("no checkpoint of step 8", "the closest steps are 7")),
        ("fits", ("--checkpoint", "{}/checkpoint"), ("does not exist", "Did you mean {}/checkpoints?")),
        ("{}/tasks/fist.yaml", (), ("there is no task file", "Did you mean {}/tasks/fits.yaml?")),
    ],
)
def test_tasks_that_cannot_be_run(folder, names, options, parts):
    words = [each.format(folder) for each in (names, *options)]
    found = said(folder, words[0], *words[1:])
    assert len(found) == bool(parts), found
    assert all(part.format(folder) in found[0] for part in parts), found


def test_contexts_are_cut_if_the_user_says_so(folder):
    """As lm_eval's Hugging Face model cuts them. The predicted memory must fit all the same."""
    truncate = {"evaluation": {"truncate": True}}
    assert said(folder, "long_context,cut_generation", **truncate) == []
    assert said(folder, "examples", "--few-shot", "2", **truncate) == []
    assert len(said(folder, "long_context,long_answer", **truncate)) == 1


def test_all_at_once_and_for_a_run(folder):
    """A run's own tasks are checked in the same way, with the folders of the configuration."""
    assert len(said(folder, "lost,long_answer,fits,long_context")) == 3
    tasks = [{"name": "lost"}, {"name": "long_context", "limit": 1}, {"name": "long_answer", "every": 0}]
    evaluation = {"tasks": tasks, "task_folders": [str(folder / "tasks")]}
    (line,) = before_training([], config(folder, evaluation=evaluation))
    assert line.startswith("evaluation.tasks: the data of lost")
    assert len(before_start([], config(folder, evaluation=evaluation))) == 2  # also what only evaluate.py runs
    lost = {"read_less": {"loki": str(folder / "none.loki")}}
    (line,) = said(folder, "fits", evaluation=lost)
    assert line.startswith("evaluation.read_less.loki: ") and "none.loki" in line


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        ("task: mine\ndoc_to_text: !function utils.text", False),
        ("group: mine\ntask: [arc_easy]", True),
        ("include: other.yaml\ntask: mine", True),
        ("task: [arc_easy]", True),
        ("task: [", True),
    ],
)
def test_a_file_of_one_task_needs_no_index_of_the_harness(tmp_path, monkeypatch, content, whole):
    """That index takes ten seconds of every rank."""
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    monkeypatch.setattr(select, "manager", lambda folders=(), defaults=True: defaults)
    assert select.manager_for([select.Request(str(file))]) is whole


def another(folder: Path, name: str, change) -> str:
    """A tokenizer.json that differs from the run's."""
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    path = folder / name / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=3))
    Tokenizer.from_file(str(path))
    return str(path)


def exchange(content: dict) -> None:
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def forget_merges(content: dict) -> None:
    content["model"]["merges"] = []


def test_a_tokenizer_that_is_not_the_runs(folder):
    """Ids of another order, other merges, more or fewer ids. A file that is only written differently is the same."""
    assert META == durable.META
    checkpoints = folder / "checkpoints"
    for change, parts in (
        (lambda content: None, None),
        (exchange, ("its id", "'a'", "'b'")),
        (forget_merges, ("splits words in another way",)),
    ):
        path = another(folder, "other", change)
        other = config(folder, tokenizer={"type": "huggingface", "path": path})
        found = [tokenizer_problems(other, each) for each in (folder, checkpoints, checkpoints / "step_00000007")]
        assert found[0] == found[1] if parts is None else all(parts[0] in each[0] for each in found)
        if parts is None:
            assert found == [[], [], []]
        else:
            assert all(part in found[2][0] for part in (*parts, "tokenizer.path", "Fix:"))
            assert said(folder, "fits", tokenizer={"type": "huggingface", "path": path})  # evaluate.py asks
            known = {"checkpoint": {"allow_changes": ["tokenizer"]}}
            assert tokenizer_problems(config(folder, tokenizer=other.tokenizer.model_dump(), **known), folder) == []
    small = config(folder, tokenizer={"type": "bytes"})
    assert "it has 257 ids" in tokenizer_problems(small, folder)[0]


def test_a_tokenizer_that_did_not_make_the_data_or_the_exported_model(folder, tmp_path):
    """Of a run without a tokenizer its token files know. A Hugging Face folder has its own."""
    own = config(folder)
    manifest = Manifest({"name": "made.json", "hash": "0" * 64}, 1, 1, 1, "uint16", "", "")
    manifest.write(tmp_path / "text")
    run = tmp_path / "step_00000001"
    run.mkdir()
    recorded = {"tokenizer": {"type": "none"}, "data": {"train": [{"path": str(tmp_path / "text")}]}}
    (run / META).write_text(json.dumps({"config": yaml.safe_dump(recorded)}))
    (line,) = tokenizer_problems(own, tmp_path)
    assert "text was made with made.json" in line
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    tokenizer_file(exported)
    assert tokenizer_problems(own, exported) == []
    (exported / "tokenizer.json").write_text(Path(another(folder, "third", exchange)).read_text())
    assert "its id" in tokenizer_problems(own, exported)[0]


def test_the_launcher_needs_no_torch_for_it(folder):
    """Tasks are loaded and their texts are counted in a process that stays small."""
    (folder / "run.yml").write_text(yaml.safe_dump({**settings("gpt_neox", folder), "evaluation": {}}))
    program = (
        "import sys\nfrom megatron.config import load\nfrom megatron.evaluation.arguments import before_start\n"
        "config = load([sys.argv[1]], check_inputs=False).config\n"
        "print(before_start(sys.argv[2:], config), 'torch' in sys.modules)"
    )
    words = ["--tasks", "fits,deepy_copy", "--include-path", str(folder / "tasks")]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "run.yml"), *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n") and "deepy_copy: 4 of 100 texts must fit" in done.stdout
    assert LENGTH == 64
