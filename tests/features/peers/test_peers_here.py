"""Peers that one command starts: their keys, their devices, what is refused, and a run of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.features.peers.here import make_key, overrides
from megatron.launch import together
from megatron.launch.job.hosts import HostError
from megatron.launch.job.job_plan import make_plan
from megatron.training.run import run_training
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
    words, key = overrides(config, tmp_path / "run")
    assert list(words) == ["p1", "p2", "p3"] and not (tmp_path / "run").exists()
    assert f'run.dir="{tmp_path}/run"' in words["p1"] and f'run.dir="{tmp_path}/run/peers/p3"' in words["p3"]
    assert "launch.peers=null" in words["p2"] and "peers.every=10" in words["p2"]
    names = [each for own in words.values() for each in own if each.startswith("run.name")]
    assert names == [f'run.name="{config.run.name}-{name}"' for name in ("p2", "p3")]
    make_key(key)
    before = key.read_text()
    make_key(key)
    assert key.read_text() == before and os.stat(key).st_mode & 0o777 == 0o600


def test_a_configuration_of_peers_alone_takes_no_part():
    values = {**VALUES, "launch": {"peers": 4}, "peers": {"every": 3}}
    from megatron.config.features.feature import share_of, wanted_features

    config = resolve(values)
    assert not {"peers", "peer_gradients"} & wanted_features(config).keys() and share_of(config) == (0, 1)
    with pytest.raises(ConfigError, match="must not be given with launch.peers"):
        resolve({**values, "peers": {"every": 3, "name": "a"}})
    with pytest.raises(ConfigError, match="launch.peers"):
        resolve({**values, "launch": {"peers": 1}})


@pytest.mark.parametrize(
    "other",
    [
        {"checkpoint": {"dir": "a"}},
        {"peers": {"signature": "ed25519"}},
        {"peers": {"key_file": "key"}},
        {"launch": {"peers": 2, "master_port": 7000}},
        {"launch": {"peers": 2, "bind": "cores"}},
    ],
    ids=["checkpoint.dir", "peers.signature", "peers.key_file", "launch.master_port", "launch.bind"],
)
def test_places_and_keys_that_peers_would_share_are_refused(other, request):
    with pytest.raises(ConfigError, match=request.node.callspec.id):
        resolve({**VALUES, "launch": {"peers": 2}, **other})


def test_one_process_does_not_train_a_configuration_of_peers():
    """As below srun or torchrun, whose ranks are of one run."""
    with pytest.raises(UserError, match="launch.peers = 3 must be read by `deepy train`"):
        run_training(resolve({**VALUES, "launch": {"peers": 3}}), None, None)


def test_mistakes_before_a_process_starts(tmp_path):
    with pytest.raises(ConfigError, match="must be a multiple of 30"):  # steps is 8
        together.together(plan_of(tmp_path), {})
    assert not (tmp_path / "run").exists()
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    with pytest.raises(HostError, match="must go with the runner local, not ssh"):
        together.together(plan_of(tmp_path, f"launch.hostfile={tmp_path}/hosts"), {})


def test_the_commands_of_peers_are_shown_and_not_started(tmp_path):
    plan = plan_of(tmp_path, "peers.every=4", "launch.ranks=2")
    text = together.describe_peers(plan, {"OMP_NUM_THREADS": "3"})
    assert text.count("OMP_NUM_THREADS=3") == 3 and f"> {tmp_path}/run/peers/p2/console.log" in text
    assert all(words.count("launch.ranks=2") == 1 for words in text.splitlines() if "deepy.py" in words)
    assert not (tmp_path / "run").exists()
    with pytest.raises(HostError, match="must be a folder in which peers can write"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run/peers").touch()
        together.together(plan, {})


def test_the_end_of_a_peer_is_reported_while_others_train():
    begin = time.monotonic()
    scripts = {"p1": "import time; time.sleep(1.5)", "p2": "raise SystemExit(3)"}
    started = {name: subprocess.Popen([sys.executable, "-c", each]) for name, each in scripts.items()}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "log", lambda text: seen.append((text, started["p1"].poll())))
        assert together._wait(started) == 3
    assert seen == [("peer p2 ended with status 3", None)] and time.monotonic() - begin > 1


def test_a_mistake_of_one_peer_stops_the_others():
    scripts = {"p1": "import time; time.sleep(60)", "p2": "raise SystemExit(2)"}
    begin = time.monotonic()
    assert together._wait({name: subprocess.Popen([sys.executable, "-c", each]) for name, each in scripts.items()}) == 2
    assert time.monotonic() - begin < 40


def test_an_ignored_signal_stays_ignored():
    """As of `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with together._forwarding({}):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_peers_divide_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(together.devices, "vendor", lambda: "nvidia")
    monkeypatch.setattr(together.devices, "_installed", lambda maker: 9)
    seen = {"CUDA_VISIBLE_DEVICES": "1,2,4,5,6,7,8"}
    plan = plan_of(tmp_path, "launch.device=auto", "launch.ranks=2")
    found = [each["CUDA_VISIBLE_DEVICES"] for each in together._variables(plan, seen)]
    assert found == ["1,2", "4,5", "6,7"]
    with pytest.raises(HostError, match="at most the 7 devices of this machine: 3 \\* 3"):
        together._variables(
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
