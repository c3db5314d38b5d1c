"""Two hosts of two ranks with a slow link between them: what --tune chooses there is faster and sends less."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import yaml

from tests.launch.host_job import DEEPY
from tests.launch.namespaces import why_not
from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.limit(1800)]
LINK = ("tbf", "rate", "100mbit", "burst", "32kbit", "latency", "400ms")
FORWARD = ["launch.forward=[PYTHON*]", "launch.environment={OMP_NUM_THREADS: '1'}"]
TINY = str(ROOT / "configs/test/tiny_neox.yml")


@pytest.fixture(scope="module")
def slow_link(cluster):
    """The shared hosts. Each sends 100 Mbit/s at most while this file's tests run."""
    if reason := why_not("tc"):
        pytest.skip(reason)
    shaped = [cluster.run(name, ["tc", "qdisc", "add", "dev", "eth0", "root", *LINK]) for name in cluster.names]
    if any(each.returncode for each in shaped):
        pytest.skip(f"tc cannot shape a link here: {shaped[0].stderr.strip()}")
    yield cluster
    for name in cluster.names:
        cluster.run(name, ["tc", "qdisc", "del", "dev", "eth0", "root"])


@pytest.fixture(scope="module")
def tuned(slow_link, tmp_path_factory) -> tuple[Path, dict]:
    """The folder with machine.yml, and what was measured."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    tool = str(ROOT / "bench/communication.py")
    words = ["--tune", "--least", "256K", "--most", "1M", "--seconds", "4", "--json", "--picture", "tuned.png"]
    command = [*DEEPY, "--hostfile", "hosts", tool, TINY, *FORWARD, *words]
    done = slow_link.run("login", command, timeout=1200, folder=folder)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "{" in line]
    return folder, json.loads(line[line.index("{") :])


def test_the_table_is_faster_and_sends_less(tuned):
    """By pairs of neighbouring turns, and by the bytes that the hosts' own interfaces count."""
    folder, found = tuned
    assert (folder / "tuned.png").read_bytes().startswith(b"\x89PNG")
    table = yaml.safe_load((folder / "machine.yml").read_text())["algorithms"]
    assert (table["ranks"], table["hosts"], table["backend"]) == (4, 2, "gloo")
    chosen = {row["operation"]: row["choices"][-1][1] for row in table["table"]}
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        name = chosen[operation]
        assert name != "backend", f"{operation}: two levels send two thirds of the bytes over a link that decides"
        point = next(each for each in found["points"] if (each["operation"], each["size"]) == (operation, 2**20))
        ratios = [a / b for a, b in zip(point["rounds"]["backend"], point["rounds"][name])]
        assert statistics.median(ratios) > 1, (operation, ratios)
        # headers and answers of TCP come to less than a tenth. A reduce-scatter of gloo's is an all-reduce
        twice = 2 if (operation, name) == ("reduce_scatter", "two_level") else 1
        assert 1 <= point["link"][name] / point["crossing"][name] / twice < 1.1, point
        assert point["link"]["backend"] > 1.4 * point["link"][name], point


def test_a_run_uses_it(slow_link, tuned):
    """Training over the same hosts, its losses those without the table."""
    folder, _ = tuned
    found = {}
    for name, own in (("plain", []), ("table", ["parallel.communication.table=machine.yml"])):
        words = [
            f"run.dir={name}",
            "training.steps=2",
            "schedule.warmup_steps=0",
            "checkpoint.every=null",
            "logging.communication=counts",
            *own,
        ]
        command = [*DEEPY, "--hostfile", "hosts", str(ROOT / "train.py"), TINY, *FORWARD, *words]
        done = slow_link.run("login", command, timeout=600, folder=folder)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [line for line in lines if "loss" in line]
    plain, table = ([line["loss"] for line in found[name]] for name in ("plain", "table"))
    assert table == pytest.approx(plain, rel=1e-4)
    assert any(group.endswith("/between") for group in found["table"][-1]["communication"])
