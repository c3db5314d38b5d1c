"""The commands of docs/peers.md, run in order in a copy of the source as a reader would, on smaller runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.features.peers.test_peer_runs import lines
from tests.paths import ROOT
from tests.test_quickstart import LAYERS, SMALL
from tests.test_readme import copy, shell  # noqa: F401  (copy is a fixture)

PAGE = ROOT / "docs" / "peers.md"
EXAMPLE = "examples/peers/two_peers.yml"
SHORT = "training.steps=20"
QUICK = " ".join([*SMALL, "training.steps=60", f"'model.layers={LAYERS['pythia']}'"])
# Blocks by their first words, and how their commands are changed. Of two quick starts the first is run.
RUN = {
    "deepy peers key",
    "deepy quickstart",
    "deepy peers serve",
    "deepy peers plan",
    "deepy train run.yml peers.replay",
}
ELSEWHERE = {
    "deepy train --hostfile": "tests/features/peers/test_peers_on_hosts.py",
    "deepy train run.yml peers.folder": "tests/features/peers/test_direct.py",
    "python -m bench slow-links": "bench/links/slow_links.py",
    "python -m bench peer-events": "bench/links/peer_events.py",
    "PEER_KILLS": "tests/features/peers/test_peer_kills.py",
}  # fmt: skip
SERVER = """
{serve} > serve.log &
server=$!
trap "kill $server" EXIT
until grep -q serving serve.log; do kill -0 $server; sleep 0.1; done
port=$(sed 's/.*port \\([0-9]*\\).*/\\1/' serve.log)
{train}
"""


def blocks() -> dict[str, str]:
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return {next(each for each in [*RUN, *ELSEWHERE] if text.startswith(each)): text for text in found}


def both(train: str) -> str:
    """A command of a peer as the commands of left and right, side by side."""
    return f"{train.format(name='left')} &\nother=$!\n{train.format(name='right')}\nwait $other"


@pytest.mark.tour
def test_the_page(copy):  # noqa: F811
    shutil.copytree(ROOT / "examples/peers", copy / "examples/peers")
    found = blocks()
    assert found.keys() == RUN | ELSEWHERE.keys() and all((ROOT / each).exists() for each in ELSEWHERE.values())

    def run(script: str) -> str:
        done = shell(script, copy)
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run(found["deepy peers key"].replace(EXAMPLE, f"{EXAMPLE} {SHORT}") + "wait")
    assert [len(each["members"]) for each in lines(copy / "runs/shared")] == [2, 2]
    serve, train = found["deepy peers serve"].splitlines()
    serve = serve.replace("runs/shared", "runs/served").replace("0.0.0.0:7000", "127.0.0.1:0")
    train = train.replace("run.yml", f"{EXAMPLE} {SHORT} run.name=s_{{name}}").replace(
        "peers.name=left", "peers.name={name}"
    )
    run(SERVER.format(serve=serve, train=both(train.replace("host:7000", "127.0.0.1:$port"))))
    replay = found["deepy train run.yml peers.replay"].replace("run.yml", f"{EXAMPLE} {SHORT}").strip()
    replay = replay.replace("/shared/run", "runs/served").replace("/shared/again", "runs/again")
    run(both(replay.replace("again/a", "again/{name}").replace("peers.name=a", "peers.name={name}")))
    members = [
        [each["members"] for each in lines(copy / folder)] for folder in ("runs/shared", "runs/served", "runs/again")
    ]
    assert members[0] == members[1] == members[2], "the same bits over a folder, over sockets and in a replay"
    assert "utilisation 81.8%" in run(found["deepy peers plan"])
    said = run(f"{found['deepy quickstart'].splitlines()[0]} {QUICK} || test $? = 1")
    assert "4 peers on this machine" in said and "validation loss" in said
    quick = copy / "runs/quickstart"
    assert [len(each["members"]) for each in lines(quick / "peers/shared")] == [4, 4]
    losses = {_last_loss(folder) for folder in (quick, *(quick / f"peers/p{number}" for number in (2, 3, 4)))}
    assert len(losses) == 1, "of the common weights"


def _last_loss(folder: Path) -> float:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["validation"]["validation"]["loss"] for row in rows if "validation" in row][-1]
