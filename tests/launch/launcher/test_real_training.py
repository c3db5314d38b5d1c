"""Training on several hosts for real: the losses of one host, whatever starts the ranks and whatever dies on
the way.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.launch.host_job import DEEPY, skip_without
from tests.launch.namespaces import Cluster
from tests.paths import ROOT
from tests.training.test_run import job as train
from tests.workers import run as on_ranks

pytestmark = [pytest.mark.hosts, pytest.mark.limit(900)]
STEPS = 16
SETTINGS = [f"training.steps={STEPS}", "training.global_batch_size=24", "launch.environment.OMP_NUM_THREADS='1'"]
TRAIN = [str(ROOT / "train.py"), str(ROOT / "configs/test/tiny_neox.yml"), *SETTINGS]
TENSOR = ["parallel.tensor=2", "checkpoint.every=null"]
HOSTFILE = ["--hostfile", "hosts"]
ROUNDING = {"rel": 1e-4}  # another number of ranks adds in another order


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, the last entry where a step came twice."""
    return {line["step"]: line["loss"] for line in lines(run / "metrics.jsonl") if "loss" in line}


def hosts(folder: Path, number: int, slots: int) -> None:
    (folder / "hosts").write_text("".join(f"node{index + 1} slots={slots}\n" for index in range(number)))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """ranks -> their losses here, in pairs of tensor parallel ones."""

    @cache
    def of(ranks: int) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("here")
        (folder / "tiny.yml").write_text(f"extends: {ROOT / 'configs/test/tiny_neox.yml'}\n")
        on_ranks(ranks, train, str(folder), ranks, *SETTINGS, *TENSOR)
        found = losses(folder / "run")
        assert sorted(found) == list(range(STEPS))
        return found

    return of


def started_by(way: str) -> list[str]:
    """The command line up to the script. srun, mpirun and torchrun start it without deepy.py."""
    python, torchrun = sys.executable, [sys.executable, "-m", "torch.distributed.run"]
    meet = ["-x", "MASTER_ADDR=10.77.0.10", "-x", "MASTER_PORT=29500"]
    return {
        "pdsh": [*DEEPY, *HOSTFILE, "--runner", "pdsh"],
        "openmpi": [*DEEPY, *HOSTFILE, "--runner", "openmpi"],
        "mpich": [*DEEPY, *HOSTFILE, "--runner", "mpich"],
        "torchrun": [*DEEPY, *HOSTFILE, "--runner", "torchrun"],
        "salloc": ["salloc", "-N2", "--ntasks-per-node=2", *DEEPY],
        "srun alone": ["srun", "-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", python],
        "mpirun alone": [
            "mpirun.openmpi",
            "--allow-run-as-root",
            "--host",
            "node1:2,node2:2",
            "-np",
            "4",
            "-x",
            "OMP_NUM_THREADS",
            *meet,
            python,
        ],
        "torchrun alone": [
            *torchrun,
            "--nnodes=2",
            "--nproc-per-node=2",
            "--master-addr=10.77.0.10",
            "--master-port=29400",
            "--node-rank=%d",
        ],
    }[way]


def slow(way: str):
    return pytest.param(way, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "way",
    [
        slow("pdsh"),
        slow("openmpi"),  # that it starts ranks which meet is seen in test_real_hosts.py
        slow("mpich"),
        slow("torchrun"),
        slow("salloc"),
        slow("srun alone"),
        slow("mpirun alone"),
        "torchrun alone",
    ],
)
def test_whatever_starts_the_ranks_the_losses_are_those_of_one_host(request, cluster, reference, tmp_path, jobs, way):
    """Tensor parallel within a host, data parallel across. Every loss equal, to the last digit."""
    skip_without("openmpi" if way.startswith("mpirun") else way)
    hosts(tmp_path, 2, 2)
    slurm = way in ("salloc", "srun alone")
    environment = request.getfixturevalue("slurm").environment if slurm else None
    command = [*started_by(way), *TRAIN, *TENSOR, f"run.dir={tmp_path}/run"]
    if way == "torchrun alone":
        started = [
            jobs(cluster, tmp_path, [word.replace("%d", str(index)) for word in command], host=f"node{index + 1}")
            for index in range(2)
        ]
    else:
        started = [jobs(cluster, tmp_path, command, environment=environment)]
    for job in started:
        status, _, error = job.finish()
        assert status == 0, error
    assert losses(tmp_path / "run") == reference(4)
    assert started[0].nothing_left()


def first_checkpoint(job, run: Path) -> None:
    """Wait until there is something to start again from."""
    end = time.monotonic() + 400
    while "checkpoint_written" not in {event["event"] for event in lines(run / "ledger.jsonl")}:
        assert time.monotonic() < end and job.process.poll() is None, job.process.communicate(timeout=10)
        time.sleep(0.02)


def restart_of(run: Path) -> dict:
    (restart,) = [each for each in lines(run / "ledger.jsonl") if each["event"] == "restart"]
    return restart


def test_a_killed_rank_and_a_restart_change_nothing(cluster, reference, tmp_path, jobs):
    """Of two tensor parallel ranks on two hosts."""
    hosts(tmp_path, 2, 1)
    again = ["parallel.tensor=2", "checkpoint.every=2", "launch.restart_delay=0", "run.dir=run"]
    job = jobs(cluster, tmp_path, [*DEEPY, *HOSTFILE, "--restarts", "1", *TRAIN, *again])
    run = tmp_path / "run"
    first_checkpoint(job, run)
    log = (run / "logs" / "rank_0001.log").read_text()
    cluster.run("node2", ["kill", "-9", log.split("started as process ")[1].split(":")[0]])
    status, _, error = job.finish()
    assert status == 0, error
    assert "first failure: rank 1 on node2" in error and "SIGKILL (137)" in error
    assert losses(run) == reference(2), "every loss, to the last digit"
    restart = restart_of(run)
    assert (restart["attempt"], restart["rank"], restart["host"], restart["status"]) == (1, 1, "node2", 137)
    assert job.nothing_left()


@pytest.mark.parametrize("act", [slow("kill"), "cut"])  # a host that is killed ends its ranks, a host cut off must
def test_the_run_goes_on_with_the_hosts_that_are_left(hosts_work, reference, tmp_path, jobs, act):
    """A host dies, or its cable is cut: data parallel on the hosts that are left, the same global batch, the same data.

    Three hosts of one rank each become two, or two hosts of two ranks, tensor parallel, become one.
    """
    number, slots, tensor = (3, 1, 1) if act == "kill" else (2, 2, 2)
    lost = f"node{number}"
    with Cluster(tmp_path / "cluster", [f"node{index + 1}" for index in range(number)]) as cluster:
        hosts(tmp_path, number, slots)
        limits = ["launch.timeout=15", "launch.heartbeat=15", "launch.grace=5", "launch.restart_delay=0"]
        layout = [f"parallel.tensor={tensor}", "checkpoint.every=2", "run.dir=run"]
        job = jobs(cluster, tmp_path, [*DEEPY, *HOSTFILE, "--restarts", "1", *TRAIN, *layout, *limits])
        run = tmp_path / "run"
        first_checkpoint(job, run)
        end = time.monotonic() + 300
        cluster.kill(lost) if act == "kill" else cluster.cut(lost)
        while not lines(run / "ledger.jsonl") or lines(run / "ledger.jsonl")[-1]["event"] != "restart":
            assert time.monotonic() < end and job.process.poll() is None, job.process.communicate(timeout=10)
            time.sleep(0.02)
        if act == "cut":
            assert job.nothing_left(lost), "the host that was cut off ends its ranks by itself"
        status, _, error = job.finish()
        assert status == 0, error
        ranks = slots * number
        assert f"continuing without {lost}: {ranks - slots} ranks in place of {ranks}" in error
        assert losses(run) == pytest.approx(reference(4), **ROUNDING) and len(losses(run)) == STEPS
        assert lost not in restart_of(run)["hosts"] and restart_of(run)["attempt"] == 1
        assert job.nothing_left(*(name for name in cluster.inits if name != lost))
