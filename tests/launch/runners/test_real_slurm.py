"""A real Slurm on hosts made of namespaces: salloc, srun, signals, and a batch job that is warned and queued again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch.host_job import DEEPY, looping
from tests.launch.namespaces import wait_for
from tests.launch.running import CONFIG
from tests.paths import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.limit(1200)]
WORKER = str(ROOT / "tests" / "launch" / "gloo_worker.py")
ALLOCATE = ("salloc", "-N2", "--ntasks-per-node=2")


@pytest.fixture
def start(cluster, slurm, tmp_path, jobs):
    """Starts deepy.py in an allocation: no hostfile, no ssh."""

    def started(*own):
        command = [*ALLOCATE, *looping(tmp_path, *own, hostfile=False)]
        return jobs(cluster, tmp_path, command, environment=slurm.environment)

    return started


def test_an_allocation_needs_nothing_else_and_signals_reach_the_ranks(start):
    job = start()
    assert [(each["sum"], each["host"], each["starter"]) for each in job.up(4)] == [
        (10.0, f"node{1 + rank // 2}", "agent") for rank in range(4)
    ]
    os.kill(job.launcher(), signal.SIGUSR1)
    status, _, error = job.finish()
    assert status == 128 + signal.SIGUSR1 and "inside Slurm job" in error, error
    assert job.saved(4) == [str(int(signal.SIGUSR1))] * 4 and job.nothing_left()


@pytest.mark.slow  # through ssh and mpirun it is seen in test_real_hosts.py
def test_a_killed_rank_is_named(cluster, slurm, tmp_path, jobs):
    """Also where the job has its hosts in another order than Slurm, as after a spare has taken a place."""
    words = looping(tmp_path, options=("--runner", "slurm"))
    (tmp_path / "hosts").write_text("node2 slots=2\nnode1 slots=2\n")
    job = jobs(cluster, tmp_path, [*ALLOCATE, *words], environment=slurm.environment)
    up = job.up(4)
    assert [each["host"] for each in up] == ["node2", "node2", "node1", "node1"]
    cluster.run("node1", ["kill", "-9", str(up[3]["pid"])])
    status, _, error = job.finish()
    assert status == 137 and "first failure: rank 3 on node1" in error, error
    assert job.nothing_left()


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing(start):
    job = start()
    job.up(4)
    os.kill(job.launcher(), signal.SIGKILL)
    assert job.nothing_left()
    assert job.saved(4) == [str(int(signal.SIGTERM))] * 4


@pytest.mark.parametrize("sent_by", ["us", pytest.param("slurm", marks=pytest.mark.slow)])
def test_a_batch_job_is_warned_saves_and_is_queued_again(slurm, tmp_path, sent_by):
    """The whole cycle: job script, submission, warning before the end, save, requeue, second start, end.

    Slurm may warn up to a minute before it was asked to, so a job of a minute can be warned before it is up. We send
    the same signal the same way once it is. The other case waits for Slurm's own, for minutes.
    """
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "a.yml").write_text(CONFIG)
    variables = {"NOTES": str(notes), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    batch = ["launch.batch.nodes=2", "launch.batch.time='00:03:00'", "launch.batch.warning=60"]
    words = ["--ranks", "2", "--sbatch", "--submit", WORKER, "a.yml", "launch.device=cpu", *batch, "--", "loop"]
    out = slurm.run("login", [*DEEPY, *words], folder=tmp_path, **variables)
    assert out.returncode == 0 and "Submitted batch job" in out.stdout, out.stderr
    number = out.stdout.split()[-1]

    def arrived(*names: str) -> None:
        wait_for(lambda: all((notes / name).exists() for name in names), 300, said)

    def said() -> object:
        shown = slurm.run("login", ["scontrol", "show", "job", number]).stdout
        return names_of(notes), shown, [path.read_text() for path in tmp_path.glob("runs/*/slurm-*.out")]

    arrived("up.3")
    if sent_by == "us":
        slurm.run("login", ["scancel", "--signal=USR1", number])  # to the job's steps, as `--signal` without `B:` does
    arrived(*(f"saved.{rank}" for rank in range(4)))
    assert [(notes / f"saved.{rank}").read_text() for rank in range(4)] == [str(int(signal.SIGUSR1))] * 4
    for path in notes.iterdir():
        path.unlink()

    state = ["squeue", "-h", "-j", number, "-o", "%T"]
    wait_for(lambda: slurm.run("login", state).stdout.strip() == "PENDING", 300, said)
    second = int(time.time())  # slurmd refuses a job that it has ended in the same second
    wait_for(lambda: int(time.time()) > second + 1, 300, said)

    def started_again() -> bool:
        # A job that was queued again waits for two minutes by default (and once Slurm has said so
        # itself).
        if slurm.run("login", state).stdout.strip() == "PENDING":
            slurm.run("login", ["scontrol", "update", f"JobId={number}", "StartTime=now"])
        return (notes / "up.3").exists()

    wait_for(started_again, 300, said)
    assert json.loads((notes / "up.3").read_text())["sum"] == 10.0
    slurm.run("login", ["scancel", number])
    arrived(*(f"saved.{rank}" for rank in range(4)))


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow  # srun starts the ranks of the batch job, too
def test_srun_alone_starts_the_script(cluster, slurm, tmp_path, jobs):
    (tmp_path / "a.yml").write_text(CONFIG)
    command = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, WORKER, "a.yml", "--", "steps", "3"]
    job = jobs(cluster, tmp_path, command, environment=slurm.environment)
    status, _, error = job.finish()
    assert status == 0, error
    assert [(each["sum"], each["starter"], each["interface"]) for each in job.up(4)] == [(10.0, "slurm", "eth0")] * 4


def test_a_recipe_of_curation_on_slurm(slurm, tmp_path):
    """Each step is an array of jobs after the one before. The output has the bytes of one process."""
    pytest.importorskip("datatrove")
    from tests.curation.recipes import curate, recipe, tree
    from tests.curation.test_runs import sources

    stages = [{"keep": {"signals": {"rps_doc_word_count": [3, 1000]}}}, {"pii": {}}, {"exact": {}}]
    made = sources(tmp_path)
    curate(tmp_path, stages, made)
    (tmp_path / "out").rename(tmp_path / "local")
    prepare = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT} OMP_NUM_THREADS=1"
    options = {"partition": "main", "time": "00:10:00", "memory": 1, "prepare": prepare}
    recipe(tmp_path, stages, made, executor="slurm", slurm=options, workers=2)
    words = [sys.executable, str(ROOT / "tools/data/curate.py"), str(tmp_path / "recipe.yml")]
    out = slurm.run("login", words, folder=tmp_path, PYTHONPATH=str(ROOT), HOME=str(tmp_path))
    assert out.returncode == 0 and "submitted to Slurm: shard (2 tasks)" in out.stdout, out.stderr

    def said() -> object:
        logs = [path.read_text()[-2000:] for path in (tmp_path / "out/states/logs").rglob("*.out")]
        return slurm.run("login", ["squeue"]).stdout, logs

    wait_for((tmp_path / "out" / "report.json").exists, 300, said)
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
