"""Another user of the host writes into the ranks' store while the run saves in the background."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.checkpoint.format.communicator import StoreCommunicator
from megatron.worker.network import listen_on
from megatron.worker.rendezvous import SealedStore
from tests.paths import ROOT

# It has neither the run's environment nor its memory. It guesses keys, also behind each prefix that it can list.
STRANGER = """
import socket, sys, time
from datetime import timedelta
import torch.distributed as dist
port, written, store = int(sys.argv[1]), 0, None
print("ready", flush=True)
while True:
    try:
        if store is None:  # a store that waits for its server asks at growing intervals, and misses a short run
            socket.create_connection(("127.0.0.1", port)).close()
        store = store or dist.TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=2))
        listed = {key.split("/")[0] + "/" for key in store.list_keys()}
        for prefix in ("", *listed):
            for number in range(1, 40):
                for rank in ("0", "1", "all"):
                    store.set(f"{prefix}communicator/background/{number}/{rank}", '["forged"]')
                    written += 1
            store.set(f"{prefix}left/1", "")
        print(written, flush=True)
        time.sleep(0.02)
    except Exception:
        if written:
            break
        time.sleep(0.01)
"""


@pytest.mark.tour
def test_a_run_ends_well_whatever_keys_a_stranger_guesses(tmp_path):
    with listen_on("127.0.0.1", one_host=True) as free:
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JOB_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(port)], env=clean, text=True, **pipes)
    assert stranger.stdout.readline() == "ready\n"
    words = [
        f"run.dir={tmp_path / 'run'}", "training.steps=12", "schedule.warmup_steps=0", "checkpoint.every=1",
        "checkpoint.asynchronous=true", "launch.device=cpu", f"launch.master_port={port}", "evaluation.at_end=false",
        "logging.curve=false",
    ]  # fmt: skip
    command = [sys.executable, "deepy.py", "--ranks", "2", "train.py", "configs/test/tiny_llama.yml", *words]
    try:
        done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=500)
    finally:
        stranger.kill()
        out, _ = stranger.communicate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(out.splitlines()) > 10, "the stranger has reached the store"
    assert "first failure" not in done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert len([each for each in events if each["event"] == "checkpoint"]) >= 2
    assert (tmp_path / "run" / "checkpoints" / "step_00000012" / "manifest.json").is_file()


def test_a_forged_answer_is_not_believed():
    """Not even under the right key, which a stranger can list once it is there."""
    store = dist.HashStore()
    ours = SealedStore(store, "x", "secret")
    ours.set("a", "true")
    assert ours.get("a", timedelta(seconds=1)) == "true"
    for forged in ("", "false", "0" * 64 + "false", store.get(ours.key("a")).decode()[:64] + "false"):
        store.set(ours.key("a"), forged)
        for read in (ours.get, lambda name, timeout: ours.get_all(["b", name], timeout)):
            ours.set("b", "1")
            with pytest.raises(dist.DistStoreError, match="not from a rank of this run"):
                read("a", timedelta(seconds=0.05))
    store.set(ours.key("a"), store.get(ours.key("b")).decode())  # a value of another name
    with pytest.raises(dist.DistStoreError):
        ours.get("a", timedelta(seconds=0.05))
    threading.Timer(0.2, ours.set, ("a", "late")).start()
    assert ours.get_all(["a", "b"], timedelta(seconds=30)) == ["late", "1"]


def test_keys_follow_from_the_secret():
    one, two = (StoreCommunicator(dist.HashStore(), 0, 1, "background", secret=each) for each in ("a", "b"))
    assert one._store.key("1/all") != two._store.key("1/all")
    assert one.gather(7) == [7]
