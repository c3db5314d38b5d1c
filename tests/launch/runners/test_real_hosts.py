"""Several hosts for real: namespaces with their own sshd, and every way of starting ranks on them.

Only as root with the programs in place (tests/launch/debian-packages, which .ci/run installs). Skipped with the reason
elsewhere. The ranks of these tests only exchange messages. In tests/launch/launcher/test_real_training.py they train.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import pytest

from tests.launch.host_job import looping, skip_without
from tests.launch.namespaces import PORT, Cluster, wait_for
from tests.paths import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.limit(600)]
# Every runner starts, and stops by a signal, in `make test`. How the others take a death waits for `-m slow`.
RUNNERS = ["ssh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("openmpi", "pdsh", "mpich"))]


@pytest.fixture
def start(cluster, tmp_path, jobs):
    """Starts a job on the two shared hosts, by default of one rank on each."""
    return lambda *own, host="login", **options: jobs(cluster, tmp_path, looping(tmp_path, *own, **options), host=host)


@pytest.mark.parametrize(
    ("runner", "number"),
    [("ssh", signal.SIGTERM), ("pdsh", signal.SIGUSR1), ("openmpi", signal.SIGTERM), ("mpich", signal.SIGUSR1)],
)
def test_four_ranks_meet_and_a_signal_reaches_them_all(start, runner, number):
    skip_without(runner)
    job = start(options=("--runner", runner), slots=2)
    up = job.up(4)
    assert [each["sum"] for each in up] == [10.0] * 4
    assert [each["host"] for each in up] == ["node1", "node1", "node2", "node2"]
    assert [each["local"] for each in up] == [[0, 2], [1, 2]] * 2
    assert {each["interface"] for each in up} == {"eth0"}, "the network that all share, not the own name's loopback"
    os.kill(job.launcher(), number)
    status, _, error = job.finish()
    assert status == 128 + number, error
    assert job.saved(4) == [str(int(number))] * 4 and job.nothing_left()


def test_options_of_ssh_instead_of_its_configuration(cluster, start):
    options = f"[-F, /dev/null, -i, {cluster.folder}/user, -o, UserKnownHostsFile={cluster.folder}/known_hosts]"
    job = start("steps", "2", overrides=(f"launch.ssh_port={PORT}", f"launch.ssh_options={options}"))
    status, _, error = job.finish()
    assert status == 0, error


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_killed_launcher_leaves_nothing(start, runner):
    skip_without(runner)
    job = start(options=("--runner", runner))
    job.up(2)
    os.kill(job.launcher(), signal.SIGKILL)
    assert job.nothing_left()
    assert job.saved(2) == [str(int(signal.SIGTERM))] * 2


@pytest.mark.parametrize("runner", [*RUNNERS, pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run_and_is_named(cluster, start, runner):
    """Also where the launcher is on the last host, which mpirun would number first."""
    skip_without(runner)
    job = start(options=("--runner", runner), host="node2" if runner == "openmpi" else "login")
    up = job.up(2)
    assert up[1]["host"] == "node2"
    cluster.run("node2", ["kill", "-9", str(up[1]["pid"])])
    status, _, error = job.finish()
    if runner == "torchrun":
        assert status != 0, error
    else:
        assert status == 137 and "first failure: rank 1 on node2" in error, error
    assert job.nothing_left()


def test_a_killed_agent_ends_the_run(cluster, start):
    job = start()
    job.up(2)
    (line,) = [line for line in cluster.processes("node2", "--agent") if "sh -c" not in line]
    cluster.run("node2", ["kill", "-9", line.split()[0]])
    status, _, error = job.finish()
    assert status == 255 and "node2 was lost" in error, error
    assert job.nothing_left()


def test_a_host_that_is_not_there(cluster, jobs, tmp_path):
    command = looping(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=2\nnowhere slots=2\n")
    job = jobs(cluster, tmp_path, command)
    status, _, error = job.finish()
    assert status == 255 and "nowhere" in error and "hostfile" in error, error
    assert job.nothing_left()


def test_a_whole_host_dies(hosts_work, tmp_path, jobs):
    """On hosts of its own, since one of them is lost."""
    with Cluster(tmp_path / "cluster") as cluster:
        job = jobs(cluster, tmp_path, looping(tmp_path, overrides=("launch.grace=5.0",)))
        job.up(2)
        cluster.kill("node2")
        status, _, error = job.finish()
        assert status == 255 and "node2" in error, error
        assert job.nothing_left("node1")


def test_the_ssh_server_of_the_containers(cluster, tmp_path, jobs):
    """tools/sshd, as in a container without a server, on another port. A run goes through it."""
    port = PORT + 1
    home = tmp_path / "home"
    home.mkdir()
    variables = {**os.environ, "HOME": str(home), "AUTHORIZED_KEYS": f"{cluster.folder}/user.pub"}
    for name in cluster.names:
        jobs(cluster, tmp_path, [str(ROOT / "tools" / "sshd"), str(port)], host=name, environment=variables)
        # one home for all, as on clusters
        wait_for(lambda: (home / ".sshd" / "key.pub").exists(), 200, lambda: "no key")
    for name in cluster.names:
        wait_for(partial(listens, cluster, name, port), 200, lambda: f"{port} is closed")
    known = tmp_path / "known_hosts"
    options = (
        f"[-F, /dev/null, -i, {cluster.folder}/user, -o, UserKnownHostsFile={known}, "
        "-o, StrictHostKeyChecking=accept-new]"
    )
    job = jobs(
        cluster,
        tmp_path,
        looping(tmp_path, "steps", "2", overrides=(f"launch.ssh_port={port}", f"launch.ssh_options={options}")),
    )
    status, _, error = job.finish()
    assert status == 0, error
    assert known.read_text().count(f"]:{port} ") == 2


def listens(cluster: Cluster, name: str, port: int) -> bool:
    probe = f"import socket; socket.create_connection(('{cluster.addresses[name]}', {port}), timeout=2)"
    return cluster.run("login", [sys.executable, "-c", probe]).returncode == 0
