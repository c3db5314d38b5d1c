"""Peers that one command starts: their keys, their devices, what is refused, and a run of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.config import ConfigError, resolve
from megatron.features.peers.here import overrides
from megatron.launch import together
from megatron.launch.job.hosts import HostError
from megatron.launch.job.job_plan import make_plan
from tests.features.peers.companies import VALUES, tensors
from tests.features.peers.test_peer_runs import lines, wait_for
from tests.paths import ROOT


def configuration(folder: Path, **sections: object) -> Path:
    path = folder / "a.yml"
    path.write_text(yaml.safe_dump({**VALUES, "run": {"dir": str(folder / "run")}, **sections}))
    return path


def plan_of(folder: Path, *words: str, environment: dict[str, str] | None = None):
    path = configuration(folder, launch={"device": "cpu", "peers": 3})
    return make_plan(str(ROOT / "train.py"), [str(path), *words], [], environment or {})


def test_each_peer_has_a_directory_and_all_have_one_key(tmp_path):
    config = plan_of(tmp_path, "peers.every=10").resolved.config
    words = overrides(config, tmp_path / "run")
    again = overrides(config, tmp_path / "run")
    assert words == again and list(words) == ["p1", "p2", "p3"]
    assert f'run.dir="{tmp_path}/run"' in words["p1"] and f'run.dir="{tmp_path}/run/peers/p3"' in words["p3"]
    assert "launch.peers=null" in words["p2"] and "peers.every=10" in words["p2"]
    assert os.stat(tmp_path / "run/peers/key").st_mode & 0o777 == 0o600


def test_a_configuration_of_peers_alone_takes_no_part():
    values = {**VALUES, "launch": {"peers": 4}, "peers": {"every": 3}}
    from megatron.config.features.feature import share_of, wanted_features

    config = resolve(values)
    assert not {"peers", "peer_gradients"} & wanted_features(config).keys() and share_of(config) == (0, 1)
    with pytest.raises(ConfigError, match="must not be given with launch.peers"):
        resolve({**values, "peers": {"every": 3, "name": "a"}})
    with pytest.raises(ConfigError, match="launch.peers"):
        resolve({**values, "launch": {"peers": 1}})


def test_mistakes_before_a_process_starts(tmp_path):
    with pytest.raises(ConfigError, match="must be a multiple of 30"):  # steps is 8
        together.together(plan_of(tmp_path), {})
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    with pytest.raises(HostError, match="must go with the runner local, not ssh"):
        together.together(plan_of(tmp_path, f"launch.hostfile={tmp_path}/hosts"), {})


def test_peers_divide_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(together.devices, "vendor", lambda: "nvidia")
    monkeypatch.setattr(together.devices, "_installed", lambda maker: 9)
    seen = {"CUDA_VISIBLE_DEVICES": "1,2,4,5,6,7,8"}
    plan = plan_of(tmp_path, "launch.device=auto", "launch.ranks=2")
    found = [each["CUDA_VISIBLE_DEVICES"] for each in together._devices(plan, seen)]
    assert found == ["1,2", "4,5", "6,7"]
    with pytest.raises(HostError, match="at most the 7 devices of this machine: 3 \\* 3"):
        together._devices(
            plan_of(tmp_path, "launch.device=auto", "launch.ranks=3", "training.global_batch_size=6"), seen
        )


@pytest.mark.tour
def test_one_key_starts_peers_and_a_signal_ends_them(tmp_path):
    """They save at the signal. The same command continues, and all end with the same weights."""
    path = configuration(tmp_path, training={**VALUES["training"], "steps": 6000}, launch={"device": "cpu", "peers": 2})
    keys = ["peers.every=2", "peers.algorithm=sparseloco", "checkpoint.every=null"]
    command = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), str(path), *keys]
    shared, environment = tmp_path / "run/peers/shared", {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(shared / "rounds/00000001.json")
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=200)[1]
    assert process.returncode == 128 + signal.SIGTERM, error
    done = len(list((shared / "rounds").iterdir()))
    command.append(f"training.stop_at_step={2 * done + 4}")
    again = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert {len(each["members"]) for each in lines(shared)} == {2}
    folders = [tmp_path / "run", tmp_path / "run/peers/p2"]
    assert (folders[1] / "console.log").read_text()
    first, other = (tensors(folder, 2 * done + 4) for folder in folders)
    assert all(other[key].equal(first[key]) for key in first if key[1] == "outer_weights")
