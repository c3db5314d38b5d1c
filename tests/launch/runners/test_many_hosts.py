"""More hosts than connections are made at once: a real launcher, real agents and ranks, and a stand-in for ssh.

A launcher makes fewer connections at once here, so that few hosts are more than that.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron.launch.launcher.launcher import AT_ONCE
from tests.launch.running import CONFIG
from tests.paths import ROOT

SSH = """#!/bin/sh
for last; do :; done
exec sh -c "$last"
"""
SCRIPT = """
import os, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
open(os.path.join("seen", rank), "w").write(world + " " + os.environ["JOB_CONFIG_SHA256"])
if rank == sys.argv[1]:  # fails when all others have come
    while len(os.listdir("seen")) < int(world): time.sleep(0.02)
    time.sleep(0.5)
    sys.exit(3)
"""


LAUNCHER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from megatron.launch.command_line import main
from megatron.launch.launcher import launcher
launcher.AT_ONCE = int(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("at_once", [4, pytest.param(AT_ONCE, marks=pytest.mark.slow)])
def test_more_hosts_than_connections_at_once(tmp_path, at_once: int):
    """All ranks start with one configuration, and the one that fails is named."""
    number = at_once + 6
    for name, text in {"bin/ssh": SSH, "script.py": SCRIPT, "a.yml": CONFIG}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "seen").mkdir()
    (tmp_path / "hosts").write_text("".join(f"node{index:04d} slots=1\n" for index in range(number)))
    last = str(number - 1)
    # All are this machine: no network but loopback is the same on all of them.
    keys = ["launch.master_address=127.0.0.1", "launch.interface=lo", "launch.device=cpu"]
    words = ["--hostfile", "hosts", "script.py", "a.yml", *keys, f"training.global_batch_size={2 * number}", "--", last]
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(at_once), *words],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=400,
    )
    assert done.returncode == 3, done.stderr
    assert f"first failure: rank {last} on node{number - 1:04d}, status 3" in done.stderr
    seen = {path.name: path.read_text().split() for path in (tmp_path / "seen").iterdir()}
    assert sorted(seen, key=int) == [str(rank) for rank in range(number)]
    assert len({tuple(each) for each in seen.values()}) == 1 and seen["0"][0] == str(number)
