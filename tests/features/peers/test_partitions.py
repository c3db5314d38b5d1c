"""Peers that come before their server, and whose network is cut in a step: one timeout, one ledger, the same bits."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.features.peers.companies import Company, act, serving
from tests.features.peers.relays import Relay
from tests.features.peers.test_peer_runs import lines, same, wait_for

KEYS = {"every": 1, "algorithm": "gradients", "quorum": 2, "patience": 100.0}
TIMEOUT = 1.0


@pytest.mark.tour
def test_a_cut_network_costs_one_timeout_and_no_side_has_a_ledger_of_its_own(tmp_path):
    """c is cut off in step 4, before it has sent its gradient. The others decide the step without it, and wait for it
    in no other step. It returns, applies the lines of the others, and has a slot again. In step 13 b and c are cut off
    from the server: neither they nor a, which has it, write a line."""
    shared, steps = tmp_path / "cut/shared", "training.steps=16"
    first, second = tmp_path / "first", tmp_path / "second"
    with Company(tmp_path, {"a": 1, "b": 1, "c": 1}, **KEYS) as company:
        company.run("plain", steps)
        key = bytes.fromhex(Path(company.keys["key_file"]).read_text())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
            relays = {name: stack.enter_context(Relay(f"tcp://127.0.0.1:{port}")) for name in "abc"}
            hooks = {
                "a": [act(step=10, wait=str(shared / "announced/00000010/c"))],
                "b": [act(step=13, wait=str(second))],
                "c": [act(step=4, wait=str(first)), act(step=13, wait=str(second))],
            }
            jobs = []
            for name in company.peers:
                keys = {"timeout": TIMEOUT, "folder": relays[name].url}
                jobs.append(threads.submit(company.peer, name, "cut", steps, hooks=hooks[name], peers=keys))
            end = time.monotonic() + 100
            while not all(each.refused for each in relays.values()) and time.monotonic() < end:
                time.sleep(0.01)
            stack.enter_context(serving(shared, "peers", "abc", key, port))  # later than its peers
            wait_for(shared / "rounds/00000003.json")
            relays["c"].is_cut = True
            first.touch()
            wait_for(shared / "rounds/00000007.json")
            relays["c"].is_cut = False
            wait_for(shared / "rounds/00000012.json")
            relays["b"].is_cut = relays["c"].is_cut = True
            second.touch()
            time.sleep(3 * TIMEOUT)
            alone = (shared / "rounds/00000013.json").exists()
            relays["b"].is_cut = relays["c"].is_cut = False
            for job in jobs:
                job.result()
        assert not alone, "a decided a step without a quorum"
        found = lines(shared)
        assert [each["round"] for each in found] == list(range(16))
        absent = {each["round"]: each["absent"] for each in found if each["absent"]}
        assert absent.pop(4) == {"c": "silent"}
        assert set(absent) <= {13}, "a peer that is known to be away is not waited for"
        assert [slot["peer"] for slot in found[3]["slots"]] == ["a", "b", "c"]
        assert {slot["peer"] for line in found[4:8] for slot in line["slots"]} == {"a", "b"}
        assert [slot["peer"] for slot in found[11]["slots"]] == ["a", "b", "c"], "it has come back"
        for name in company.peers:
            assert same(company.tensors("plain", "a", 16), company.tensors("cut", name, 16)), name
