"""Commands of the README and of the page on a first cluster run, typed on hosts made of namespaces, a rank on each."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.published import tokenizer_json
from tests.launch.host_job import HostJob
from tests.launch.namespaces import wait_for
from tests.launch.slurm_cluster import Slurm
from tests.paths import ROOT
from tests.test_readme import blocks, copy, search_path, shell  # noqa: F401  (copy is a fixture)

pytestmark = [pytest.mark.tour, pytest.mark.limit(1200)]
# Settings of a machine without GPUs. Every command continues where the one before it has stopped.
SCALE = {"slots=8": "slots=1", "--ranks 8": "--ranks 1", "--gpus-per-node=8": "--ntasks-per-node=1"}
STOPS = (2, 4, 6)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def commands() -> list[str]:
    return [line for block in blocks() if block.mark == "hosts" for line in block.text.splitlines()]


def scaled(text: str) -> str:
    for old, new in SCALE.items():
        text = text.replace(old, new)
    return text


def test_the_section_on_several_hosts(cluster, slurm, copy, jobs):  # noqa: F811
    (data,) = [block for block in blocks() if "data tokenize --input" in block.text]
    assert shell(data.text, copy).returncode == 0
    for block in blocks():
        if block.mark == "file":
            (copy / block.name).write_text(scaled(block.text))
    doctor, *starts = commands()
    said = typed(jobs(cluster, copy, typing(doctor), environment=environment(slurm, copy)), slurm)
    assert "node1" in said and "node2" in said or "2 hosts" in said, said
    run = copy / "runs" / "my"
    for stop, command in zip(STOPS, starts, strict=True):
        assert command.count("my.yml") == 1
        line = scaled(command).replace("my.yml", f"my.yml launch.device=cpu training.stop_at_step={stop}")
        typed(jobs(cluster, copy, typing(line), environment=environment(slurm, copy)), slurm)
        wait_for(partial(has_ended, run, stop), 400, partial(logs_of_slurm, run))  # sbatch returns at once
    ledger = [each for each in lines(run / "ledger.jsonl") if each["event"] in ("start", "resume")]
    assert [(each["event"], each["step"], each["ranks"]) for each in ledger] == [
        ("start", 0, 2),
        ("resume", 2, 2),
        ("resume", 4, 2),
    ]
    assert len(list((run / "logs").glob("rank_*.log"))) == 2


def test_the_page_of_a_first_cluster_run(cluster, slurm, copy, jobs):  # noqa: F811
    """Its commands as they are printed, with a small model, and one rank on each host."""
    page = (ROOT / "docs" / "first_cluster_run.md").read_text(encoding="utf-8")
    commands = dict(re.findall(r"^\| (\d) \| `([^`]*)` \|", page, re.MULTILINE))
    assert list(commands) == list("1234567") and commands["1"] == "make venv"
    content = page.partition("```yaml\n")[2].partition("```")[0]
    scale = {
        "configs/llama/llama2_7b.yml": "configs/test/tiny_llama.yml",
        "steps: 50000": "global_batch_size: 128, steps: 300",
        "data: {": "data: {synthetic: null, ",
        "tokenizer: {": "tokenizer: {type: huggingface, ",
        "launch: {": "launch: {device: cpu, ",
        "nodes: 8": "nodes: 2",
    }
    for old, new in scale.items():
        assert content.count(old) == 1
        content = content.replace(old, new)
    (copy / "run7b.yml").write_text(content + "model: {vocab_size: 640}\n", encoding="utf-8")
    (copy / "hosts").write_text("node1 slots=1\nnode2 slots=1\n", encoding="utf-8")
    (copy / "texts").rename(copy / "corpus")
    (copy / "data").mkdir()
    (copy / "data" / "tokenizer.json").write_text(tokenizer_json("neox"), encoding="utf-8")

    done = shell("\n".join(commands[each] for each in "234"), copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU-hours" in done.stdout and "does NOT fit" not in done.stdout
    known = environment(slurm, copy)
    said = typed(jobs(cluster, copy, typing(commands["5"]), environment=known), slurm)
    assert "all 2 hosts" in said and "FAIL" not in said, said
    said = typed(jobs(cluster, copy, typing(scaled(commands["6"])), environment=known), slurm)
    number = said.split()[-1]
    try:
        run = copy / "runs" / "run7b"
        wait_for(partial(says, run / "logs", "started from step 0"), 400, partial(logs_of_slurm, run))
        status, _, error = jobs(cluster, copy, typing(commands["7"]), environment=known).finish(100)
        assert status == 2 and "is on node" in error, error
        command = error.strip().rpartition("ask there: ")[2]
        assert f"--jobid={number}" in command
        said = typed(jobs(cluster, copy, typing(command), environment=known), slurm)
        assert "2 ranks on 2 hosts" in said, said
    finally:
        slurm.run("login", ["scancel", number])


def typing(line: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", line.partition("  #")[0]]


def environment(slurm: Slurm, folder: Path) -> dict[str, str]:
    return {**slurm.environment, "PATH": search_path(folder)}


def typed(job: HostJob, slurm: Slurm) -> str:
    status, out, error = job.finish(400)
    assert status == 0, out + error + slurm.logs()
    return out


def has_ended(run: Path, stop: int) -> bool:
    """Whether the run has ended at a step, having made every step before it once."""
    last = lines(run / "ledger.jsonl")[-1:]
    made = [line["step"] for line in lines(run / "metrics.jsonl") if "loss" in line]
    return made == list(range(stop)) and last[0]["event"] in ("stop", "end") and last[0]["step"] == stop


def says(logs: Path, text: str) -> bool:
    return any(text in path.read_text() for path in logs.glob("rank_*.log"))


def logs_of_slurm(run: Path) -> list[str]:
    return [path.read_text() for path in run.glob("slurm-*.out")]
