"""Four peers on four hosts, each with a launcher of its own. A host dies, and its peer returns on another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.features.peers.companies import VALUES, act, secret, tensors
from tests.features.peers.test_peer_runs import lines, same
from tests.launch.conftest import hosts_work, jobs  # noqa: F401
from tests.launch.host_job import DEEPY, HostJob
from tests.launch.namespaces import Cluster, wait_for
from tests.paths import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.limit(900)]
PEERS, STEPS, ASKED, BACK = "abcd", 48, 24, 40


def configuration(folder: Path, address: str) -> Path:
    peers = {
        "every": 1, "algorithm": "gradients", "members": [*PEERS], "quorum": 2, "timeout": 10.0, "state_every": 4,
        "signature": "shared_key", "key_file": secret(folder), "folder": address,
    }  # fmt: skip
    launch = {"device": "cpu", "restarts": 3, "restart_delay": 0}
    whole = {**VALUES, "training": {**VALUES["training"], "steps": STEPS}, "launch": launch, "peers": peers}
    (folder / "peers.yml").write_text(yaml.safe_dump(whole))
    return folder / "peers.yml"


def peer(name: str, file: Path, *words: str) -> list[str]:
    return [str(ROOT / "train.py"), str(file), f"peers.name={name}", f"run.dir={file.parent}/{name}", *words]


def test_a_peer_of_a_dead_host_returns_on_a_spare_one(hosts_work, tmp_path, jobs):  # noqa: F811
    """The others continue. At step 24 they wait until it asks for a state, and at step 40 until it is at this step."""
    shared, names = tmp_path / "shared", [f"node{number}" for number in range(1, 6)]
    with Cluster(tmp_path / "cluster", names) as cluster:
        file = configuration(tmp_path, f"tcp://{cluster.addresses['login']}:7000")
        bind = ["--bind", f"{cluster.addresses['login']}:7000", "--members", ",".join(PEERS)]
        serve = [sys.executable, str(ROOT / "tools/peers/serve.py"), str(shared), *bind, "--key", str(tmp_path / "key")]
        server = jobs(cluster, tmp_path, serve)
        holds = [
            act(step=ASKED, wait=str(shared / "wanted/d")),
            act(step=BACK, wait=str(shared / f"announced/{BACK:08d}/d")),
        ]
        started: dict[str, HostJob] = {}
        for place, name in enumerate(PEERS):
            (tmp_path / f"hosts.{name}").write_text(
                f"node{place + 1} slots=1\n" + ("node5 slots=1\n" if name == "d" else "")
            )
            more = ["launch.spares=1"] if name == "d" else [f"hooks={json.dumps(holds)}"]
            command = [*DEEPY, "--hostfile", f"hosts.{name}", *peer(name, file, *more)]
            started[name] = jobs(cluster, tmp_path, command)
        wait_for(
            (shared / "rounds/00000007.json").exists, 300,
            lambda: [job.process.communicate(timeout=9) for job in started.values() if job.process.poll() is not None],
        )  # fmt: skip
        cluster.kill("node4")
        for name, job in started.items():
            status, _, error = job.finish(400)
            assert status == 0, (name, error)
        assert "node5, a spare host, takes the place of node4" in error
        again = [*DEEPY, "--ranks", "1", *peer("a", file, "run.dir=again", "peers.folder=again/shared")]
        replay = cluster.run("login", [*again, f"peers.replay={shared}"], 300, tmp_path)
        assert replay.returncode == 0, replay.stderr
        server.end()
    found, replayed = lines(shared), tensors(tmp_path / "again", STEPS)
    assert [each["round"] for each in found] == list(range(STEPS))
    lost = [each["round"] for each in found if each["absent"]]
    assert len(lost) == 1 and 7 < lost[0] < ASKED and found[lost[0]]["absent"] == {"d": "silent"}
    assert "d" in found[BACK + 1]["next"]
    events = [json.loads(line)["event"] for line in (tmp_path / "d/ledger.jsonl").read_text().splitlines()]
    assert "restart" in events and "peers_jump" in events
    for name in PEERS:
        assert same(tensors(tmp_path / name, STEPS), replayed), name
