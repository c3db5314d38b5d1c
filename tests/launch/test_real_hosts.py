r"""Several hosts for real: namespaces with their own sshd, and every way of starting ranks on them.

Slow, and only as root with the packages in place; skipped with the reason elsewhere.
    apt-get install openssh-server pdsh openmpi-bin mpich iproute2 \
        slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge
    pytest -m slow tests/launch
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT

from .namespaces import PORT, Cluster, why_not
from .running import CONFIG
from .slurm_cluster import PROGRAMS, Slurm

pytestmark = pytest.mark.slow
DEEPY = [sys.executable, str(ROOT / "deepy.py")]
WORKER = str(ROOT / "tests" / "launch" / "gloo_worker.py")
NEEDS = {"pdsh": ["pdsh"], "openmpi": ["mpirun.openmpi"], "mpich": ["mpiexec.hydra"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cluster(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert made.prefix not in left, "the namespaces go with the tests"


class HostJob:
    """deepy.py on the login host, two ranks on each of two hosts."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *own: str,
        options: tuple[str, ...] = (),
        overrides: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        hostfile: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.cluster, self.notes = cluster, folder / "notes"
        self.notes.mkdir(exist_ok=True)
        (folder / "a.yml").write_text(CONFIG)
        (folder / "hosts").write_text("h0 slots=2\nh1 slots=2\n")
        hosts = ("--hostfile", "hosts") if hostfile else ()
        forward = "launch.forward=[NOTES, GLOO_TIMEOUT, OMP_NUM_THREADS, PYTHON*]"
        command = [
            *prefix,
            *DEEPY,
            *hosts,
            *options,
            WORKER,
            "a.yml",
            forward,
            *overrides,
            "--",
            *(own or ("loop",)),
        ]
        self.environment = {
            **(environment or os.environ),
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "GLOO_TIMEOUT": "15",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            cluster.enter("login", ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command]),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def note(self, name: str, timeout: float = 60.0):
        end = time.monotonic() + timeout
        while not (self.notes / name).exists():
            assert time.monotonic() < end and self.process.poll() is None, (
                f"no {name}: {self.process.communicate(timeout=10)}"
            )
            time.sleep(0.02)
        return json.loads((self.notes / name).read_text())

    def up(self) -> list[dict]:
        return [self.note(f"up.{rank}") for rank in range(4)]

    def launcher(self) -> int:
        """The process id of deepy.py itself, seen from here (nsenter forks into the host)."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        words = (entry / "cmdline").read_bytes().split(b"\0")
                        mine = f"NOTES={self.notes}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    except OSError:
                        continue
                    if (
                        mine
                        and words[0] == sys.executable.encode()
                        and b"deepy.py" in words[1]
                        and b"--agent" not in words
                    ):
                        return int(entry.name)
            time.sleep(0.05)
        raise AssertionError("no launcher")

    def finish(self, timeout: float = 90.0) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, error

    def saved(self) -> list[str]:
        return [
            (self.notes / f"saved.{rank}").read_text() if (self.notes / f"saved.{rank}").exists() else ""
            for rank in range(4)
        ]

    def nothing_left(self, *hosts: str, within: float = 8.0) -> bool:
        end = time.monotonic() + within
        while left := [
            line
            for host in hosts or self.cluster.names
            for line in self.cluster.processes(host, "deepy.py") + self.cluster.processes(host, "gloo_worker")
        ]:
            if time.monotonic() > end:
                print(left)
                return False
            time.sleep(0.2)
        return True


@pytest.fixture
def start(cluster, tmp_path):
    tmp_path.chmod(0o755)
    return lambda *own, **options: HostJob(cluster, tmp_path, *own, **options)


def skip_without(runner: str) -> None:
    import shutil

    missing = [each for each in NEEDS.get(runner, ()) if not shutil.which(each)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.mark.parametrize("runner", ["ssh", "pdsh", "openmpi", "mpich", "torchrun"])
def test_four_ranks_on_two_hosts(start, runner):
    skip_without(runner)
    job = start("steps", "3", options=("--runner", runner))
    status, out, error = job.finish()
    assert status == 0, error
    up = [json.loads((job.notes / f"up.{rank}").read_text()) for rank in range(4)]
    assert [each["sum"] for each in up] == [10.0] * 4
    assert [each["host"] for each in up] == ["h0", "h0", "h1", "h1"]
    assert [each["local"] for each in up] == [[0, 2], [1, 2]] * 2
    assert {each["interface"] for each in up} == {"eth0"}, (
        "the network that all share, not the loopback of the host's own name"
    )
    assert job.nothing_left()


def test_training_on_two_hosts_gives_the_losses_of_one(cluster, start, tmp_path):
    """Tensor parallel within a host, data parallel across: every logged loss equal, to the last digit."""

    def losses(name, *options):
        words = [*DEEPY, *options, str(ROOT / "train.py"), str(ROOT / "configs/test/tiny_neox.yml")]
        words += [f"run.dir={tmp_path}/{name}", "parallel.tensor=2", "checkpoint.every=null", "training.steps=12"]
        done = cluster.run("login", words, timeout=150)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    (tmp_path / "hosts").write_text("h0 slots=2\nh1 slots=2\n")
    one = losses("one", "--ranks", "4")
    assert len(one) == 12 and losses("two", "--hostfile", str(tmp_path / "hosts")) == one


def test_options_of_ssh_instead_of_its_configuration(cluster, start):
    options = f"[-F, /dev/null, -i, {cluster.folder}/user, -o, UserKnownHostsFile={cluster.folder}/known_hosts]"
    job = start("steps", "2", overrides=(f"launch.ssh_port={PORT}", f"launch.ssh_options={options}"))
    assert job.finish()[0] == 0


@pytest.mark.parametrize("runner", ["ssh", "pdsh", "openmpi", "mpich"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_every_rank(start, runner, number):
    skip_without(runner)
    job = start(options=("--runner", runner))
    job.up()
    os.kill(job.launcher(), number)
    begin = time.monotonic()
    status, _, error = job.finish()
    assert status == 128 + number, error
    assert job.saved() == [str(int(number))] * 4 and job.nothing_left()
    print(f"{runner}: signal {number} to end: {time.monotonic() - begin:.1f} s")


@pytest.mark.parametrize("runner", ["ssh", "pdsh", "openmpi", "mpich"])
def test_a_killed_launcher_leaves_nothing(start, runner):
    skip_without(runner)
    job = start(options=("--runner", runner))
    job.up()
    os.kill(job.launcher(), signal.SIGKILL)
    assert job.nothing_left(within=20)
    assert job.saved() == [str(int(signal.SIGTERM))] * 4


@pytest.mark.parametrize("runner", ["ssh", "pdsh", "openmpi", "mpich", "torchrun"])
def test_a_killed_rank_ends_the_run_and_is_named(cluster, start, runner):
    skip_without(runner)
    job = start(options=("--runner", runner))
    up = job.up()
    assert up[3]["host"] == "h1"
    begin = time.monotonic()
    cluster.run("h1", ["kill", "-9", str(up[3]["pid"])])
    status, _, error = job.finish()
    took = time.monotonic() - begin
    if runner == "torchrun":
        assert status != 0
    else:
        assert status == 137 and "first failure: rank 3 on h1" in error, error
        assert took < 10, took
    assert job.nothing_left()


def test_a_killed_agent_ends_the_run(cluster, start):
    job = start()
    job.up()
    (line,) = [line for line in cluster.processes("h1", "--agent") if "sh -c" not in line]
    cluster.run("h1", ["kill", "-9", line.split()[0]])
    begin = time.monotonic()
    status, _, error = job.finish()
    assert status == 255 and "h1 was lost" in error and time.monotonic() - begin < 15, error
    assert job.nothing_left()


def test_a_host_that_is_not_there(start, tmp_path):
    job = start("steps", "1")
    job.process.kill()
    job.process.communicate()
    (tmp_path / "hosts").write_text("h0 slots=2\nnowhere slots=2\n")
    again = subprocess.Popen(
        job.process.args, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, error = again.communicate(timeout=60)
    assert again.returncode == 255 and "nowhere" in error and "hostfile" in error, error
    assert job.nothing_left()


@pytest.mark.parametrize("act", ["kill", "cut"])
def test_a_host_dies_or_its_cable_is_cut(tmp_path, act):
    """On hosts of its own, since one of them is lost."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(2, folder) as cluster:
        job = HostJob(cluster, tmp_path, overrides=("launch.grace=5.0", "launch.heartbeat=15.0"))
        pids = [each["pid"] for each in job.up()]
        begin = time.monotonic()
        cluster.kill("h1") if act == "kill" else cluster.cut("h1")
        status, _, error = job.finish()
        took = time.monotonic() - begin
        print(f"{act}: {took:.1f} s\n{error}")
        assert status != 0 and took < 40
        if act == "kill":
            assert status == 255 and "h1" in error
        assert job.nothing_left("h0")
        if act == "cut":
            assert job.nothing_left("h1", within=40), "the host that was cut off ends its ranks by itself"
        assert pids


def test_the_run_goes_on_with_the_hosts_that_are_left(tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(2, folder) as cluster:
        job = HostJob(
            cluster,
            tmp_path,
            "loop",
            options=("--restarts", "2"),
            overrides=("launch.restart_delay=1.0", "launch.start_timeout=15.0"),
        )
        job.up()
        for rank in range(4):
            (job.notes / f"up.{rank}").unlink()
        cluster.kill("h1")
        again = job.note("up.1")
        assert again["sum"] == 3.0 and again["host"] == "h0" and again["attempt"] == 1
        os.kill(job.launcher(), signal.SIGTERM)
        status, _, error = job.finish()
        assert status == 143 and "without h1" in error, error


# ---- Slurm


@pytest.fixture(scope="module")
def slurm(cluster, tmp_path_factory):
    reason = why_not(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    with Slurm(cluster, tmp_path_factory.mktemp("slurm")) as made:
        yield made


ALLOCATE = ("salloc", "-N2", "--ntasks-per-node=2")


def test_slurm_runs_without_hostfile_and_ssh(cluster, slurm, tmp_path):
    job = HostJob(cluster, tmp_path, "steps", "3", prefix=ALLOCATE, hostfile=False, environment=slurm.environment)
    status, _, error = job.finish()
    assert status == 0 and "inside Slurm job" in error, error
    up = [json.loads((job.notes / f"up.{rank}").read_text()) for rank in range(4)]
    assert [(each["sum"], each["host"], each["starter"]) for each in up] == [
        (10.0, f"h{rank // 2}", "agent") for rank in range(4)
    ]
    assert job.nothing_left()


def test_srun_alone_starts_the_script(slurm, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "a.yml").write_text(CONFIG)
    slurm.environment.update(NOTES=str(tmp_path / "notes"), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = slurm.run(
        "login",
        [
            "srun",
            "-N2",
            "--ntasks-per-node=2",
            "-D",
            str(tmp_path),
            sys.executable,
            WORKER,
            "a.yml",
            "--",
            "steps",
            "3",
        ],
    )
    assert result.returncode == 0, result.stderr
    up = [json.loads((tmp_path / "notes" / f"up.{rank}").read_text()) for rank in range(4)]
    assert [(each["sum"], each["starter"], each["interface"]) for each in up] == [(10.0, "slurm", "eth0")] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_slurm_signals(cluster, slurm, tmp_path, number):
    job = HostJob(cluster, tmp_path, prefix=ALLOCATE, hostfile=False, environment=slurm.environment)
    job.up()
    os.kill(job.launcher(), number)
    assert job.finish()[0] == 128 + number
    assert job.saved() == [str(int(number))] * 4 and job.nothing_left()


def test_slurm_rank_killed(cluster, slurm, tmp_path):
    job = HostJob(cluster, tmp_path, prefix=ALLOCATE, hostfile=False, environment=slurm.environment)
    up = job.up()
    begin = time.monotonic()
    cluster.run("h1", ["kill", "-9", str(up[3]["pid"])])
    status, _, error = job.finish()
    assert status == 137 and "first failure: rank 3 on h1" in error and time.monotonic() - begin < 12, error
    assert job.nothing_left()


def test_slurm_launcher_killed(cluster, slurm, tmp_path):
    job = HostJob(cluster, tmp_path, prefix=ALLOCATE, hostfile=False, environment=slurm.environment)
    job.up()
    os.kill(job.launcher(), signal.SIGKILL)
    assert job.nothing_left(within=20)
    assert job.saved() == [str(int(signal.SIGTERM))] * 4


def test_sbatch_warns_saves_and_queues_again(cluster, slurm, tmp_path):
    """The whole cycle: job script, submission, warning signal, save, requeue, second start, end by scancel."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "a.yml").write_text(CONFIG)
    slurm.environment.update(NOTES=str(notes), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    words = [
        "--ranks",
        "2",
        "--sbatch",
        "--submit",
        WORKER,
        "a.yml",
        "launch.device=cpu",
        "launch.batch.nodes=2",
        "launch.batch.time='00:10:00'",
        "launch.batch.options=['--comment=test']",
        "--",
        "loop",
    ]
    out = slurm.run("login", ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), *DEEPY, *words])
    assert out.returncode == 0 and "Submitted batch job" in out.stdout, out.stderr
    number = out.stdout.split()[-1]

    def wait(name):
        end = time.monotonic() + 60
        while not (notes / name).exists():
            assert time.monotonic() < end, [path.read_text() for path in tmp_path.glob("runs/*/slurm-*.out")]
            time.sleep(0.05)

    wait("up.3")
    slurm.run("login", ["scancel", "--signal=USR1", number])
    for rank in range(4):
        wait(f"saved.{rank}")
    for path in notes.iterdir():
        path.unlink()
    end = time.monotonic() + 150
    while not (
        notes / "up.3"
    ).exists():  # a job that was queued again waits for two minutes, if nobody says otherwise
        said = slurm.run("login", ["scontrol", "update", f"JobId={number}", "StartTime=now"])
        assert time.monotonic() < end, (said, slurm.run("login", ["scontrol", "show", "job", number]).stdout)
        time.sleep(1)
    assert json.loads((notes / "up.3").read_text())["sum"] == 10.0
    slurm.run("login", ["scancel", number])
    for rank in range(4):
        wait(f"saved.{rank}")
