"""Where ranks meet: on one address, on a port that no other process got in between."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.worker import network
from megatron.worker.network import listen_on
from megatron.worker.rendezvous import SOCKET, open_store
from tests.launch.running import CONFIG
from tests.paths import ROOT

SOON = timedelta(seconds=300)


def listening(port: int) -> set[str]:
    """Addresses, as the kernel writes them, on which this process listens on a port. Others may do so elsewhere."""
    own, found = set(), set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            if state == "0A" and int(place.rpartition(":")[2], 16) == port and f"socket:[{inode}]" in own:
                found.add(place.rpartition(":")[0])
    return found


def own_address() -> str:
    found = [each.address for each in network.addresses() if each.interface != "lo" and ":" not in each.address]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def test_a_kept_port_is_given_to_nobody_and_to_who_asks_for_it():
    with listen_on("127.0.0.1", one_host=True) as kept:
        port = kept.getsockname()[1]
        taken = []
        for _ in range(2000):
            taken.append(listen_on("127.0.0.1", one_host=True))
        assert port not in {each.getsockname()[1] for each in taken}
        for each in taken:
            each.close()
        with pytest.raises(ConnectionRefusedError):  # it is bound, and does not listen
            socket.create_connection(("127.0.0.1", port), timeout=60)
        store = dist.TCPStore("127.0.0.1", port, 1, True, SOON)  # what `env://` would do in another script
        store.set("a", "b")
        with pytest.raises(OSError, match="in use"):
            listen_on("127.0.0.1", port, one_host=True)


def test_the_store_takes_the_socket_that_was_kept():
    kept = listen_on("127.0.0.1", one_host=True)
    port, environment = kept.getsockname()[1], {SOCKET: str(kept.detach())}
    found = []
    peer = threading.Thread(target=lambda: found.append(open_store(1, 2, "127.0.0.1", port, SOON, environment={})))
    peer.start()
    store = open_store(0, 2, "127.0.0.1", port, SOON, one_host=True, environment=environment)
    peer.join()
    store.set("a", "b")
    assert found[0].get("a") == b"b" and environment == {}
    assert listening(port) == {"0100007F"}


@pytest.mark.parametrize("number", ["", "x", "99999", "0", "other"])
def test_a_number_that_is_no_such_socket_is_not_believed(number):
    with listen_on("127.0.0.1", one_host=True) as free, listen_on("127.0.0.1", one_host=True) as other:
        port, environment = free.getsockname()[1], {SOCKET: number if number != "other" else str(other.fileno())}
        free.close()
        store = open_store(0, 1, "127.0.0.1", port, SOON, one_host=True, environment=environment)
        store.set("a", "b")
        assert listening(port) == {"0100007F"}
        assert os.fstat(other.fileno())


def test_without_a_launcher_it_listens_on_the_address_that_others_call():
    address = own_address()
    with listen_on(address) as free:
        port = free.getsockname()[1]
    store = open_store(0, 1, address, port, SOON, environment={})
    store.set("a", "b")
    assert listening(port) == {bytes(reversed(socket.inet_aton(address))).hex().upper()}


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.7", "no-such-host.invalid"])
def test_an_address_that_others_see_otherwise_is_all_addresses(address):
    """A name that is loopback only here, an address that a router translates."""
    with listen_on(address, one_host=False) as made:
        assert made.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        listen_on("127.0.0.1", server.getsockname()[1], one_host=True)


SCRIPT = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
{enter}
total = torch.ones(1)
dist.all_reduce(total)
if rank == 0:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if link.is_symlink()]
    mine = {{name[8:-1] for name in held if name.startswith("socket:")}}
    places = sorted(row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine)
    print(json.dumps([total.item(), places]), flush=True)
dist.barrier()
os._exit(0)  # see megatron/worker/job.py
"""
OURS = """
sys.path.insert(0, {root!r})
from megatron.worker.place import worker_environment
from megatron.worker.rendezvous import open_store
place = worker_environment()
os.environ.update(place.variables)
rank = place.rank
store = open_store(rank, 2, place.master_address, place.master_port, timedelta(seconds=300), one_host=place.one_host)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
THEIRS = 'dist.init_process_group("gloo", timeout=timedelta(seconds=300))\nrank = dist.get_rank()'


@pytest.mark.tour
@pytest.mark.parametrize("enter", [OURS, THEIRS], ids=["ours", "torch's own"])
def test_what_ranks_of_one_host_listen_on(tmp_path, enter):
    """No socket of a run on one machine can be reached from another. A script with torch's own store runs too."""
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT.format(enter=enter.format(root=str(ROOT))))
    command = [sys.executable, str(ROOT / "deepy.py"), "--ranks", "2", "script.py", "a.yml", "launch.device=cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    total, places = json.loads(done.stdout.strip().splitlines()[-1])
    assert total == 2.0 and places
    if enter == OURS:
        assert set(places) <= {"0100007F", "00000000000000000000000001000000"}, places


def test_a_port_that_was_asked_for_and_is_taken_is_said_before_the_start(tmp_path):
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "script.py").write_text("raise SystemExit('must not run')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [
            sys.executable,
            str(ROOT / "deepy.py"),
            "--ranks",
            "2",
            "--master-port",
            str(port),
            "script.py",
            "a.yml",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 255 and "must not run" not in done.stderr
    assert f"rank 0 cannot listen on 127.0.0.1 port {port} (launch.master_port): Address already in use" in done.stderr
