"""Hosts and a Slurm that the tests of this folder share, and a limit to how long a test may take."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.launch.host_job import HostJob
from tests.launch.namespaces import Cluster, wait_for, why_not
from tests.launch.slurm_cluster import PROGRAMS, Slurm


@pytest.fixture(scope="session")
def hosts_work():
    """Skips the test, with the reason, where hosts cannot be made of namespaces."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="package")
def cluster(hosts_work, tmp_path_factory):
    """Two hosts, node1 and node2, and one called login."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
    left = partial(processes_with, str(made.folder))
    wait_for(lambda: not left(), 200, lambda: f"hosts leave processes behind: {left()}")
    assert str(made.folder) not in Path("/proc/mounts").read_text(), "nor a mount"


@pytest.fixture(scope="package")
def slurm(cluster):
    """A Slurm on the shared hosts."""
    if missing := [each for each in PROGRAMS if not shutil.which(each)]:
        pytest.skip(f"needs {', '.join(missing)} (tests/launch/debian-packages)")
    with Slurm(cluster) as made:
        yield made


@pytest.fixture
def jobs():
    """Starts jobs on hosts, and ends them with the test: jobs(cluster, folder, command, ...)."""
    started: list[HostJob] = []

    def start(*arguments, **options) -> HostJob:
        started.append(HostJob(*arguments, **options))
        return started[-1]

    yield start
    for job in started:
        job.end()


@pytest.fixture(autouse=True)
def limit(request):
    """`@pytest.mark.limit(seconds)`: the test fails after that time, whatever it waits for."""
    marker = request.node.get_closest_marker("limit")
    if marker is None:
        yield
        return
    (seconds,) = marker.args

    def late(*_: object) -> None:
        raise TimeoutError(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def processes_with(text: str) -> list[str]:
    """Command lines, on this machine and in all its namespaces, that contain a text."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended while we looked
                continue
            if text in line:
                found.append(line)
    return found
