"""Where agents call: those with the credentials are let in, and strangers can neither enter nor disturb."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import threading
import time

import pytest

from megatron.launch.wire import listener as listening
from megatron.launch.wire.listener import AgentListener, connect, write_file
from megatron.launch.wire.protocol import decode
from megatron.worker import network
from tests.launch.running import Job
from tests.paths import ROOT


@pytest.fixture
def listener():
    made = AgentListener()
    yield made
    made.close()


def place(listener: AgentListener) -> tuple[str, int]:
    address, port = json.loads(listener.credentials())["addresses"][0]
    return address, port


def admitted(listener: AgentListener, number: int = 1, timeout: float = 100.0) -> list:
    links, end = [], time.monotonic() + timeout
    while len(links) < number and time.monotonic() < end:
        select.select([listener.ready], [], [], 0.1)
        links += listener.admitted()
    return links


def call(listener: AgentListener, tmp_path, index: int = 0, credentials: str | None = None) -> socket.socket:
    path = tmp_path / f"credentials-{index}-{time.monotonic_ns()}"
    return connect(str(write_file(path, credentials or listener.credentials())), index, 0.0)


def closed(link: socket.socket, timeout: float = 100.0) -> bool:
    """Whether the other side closes within the time."""
    link.settimeout(timeout)
    try:
        while link.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_an_agent_with_the_credentials_is_let_in(listener, tmp_path):
    path = write_file(tmp_path / "credentials", listener.credentials())
    assert path.stat().st_mode & 0o777 == 0o600
    with connect(str(path), 5) as agent:
        (link,) = admitted(listener)
        assert link.hosts == (5,)
        link.send({"type": "start"})
        assert decode(agent.recv(100).rstrip(b"\n")) == {"type": "start"}


def test_an_agent_with_another_secret_is_not(listener, tmp_path):
    with pytest.raises(OSError):
        call(listener, tmp_path, credentials=listener.credentials().replace(listener.secret, "0" * 64))
    assert admitted(listener, timeout=0.3) == []


def test_a_launcher_without_the_secret_is_not_obeyed(listener, tmp_path):
    """Somebody else listens on the launcher's port: it must not be able to give an agent a command."""
    credentials = listener.credentials()
    listener.secret = "0" * 64
    with pytest.raises(ConnectionError):
        call(listener, tmp_path, credentials=credentials)


def test_a_proof_that_was_overheard_is_worth_nothing(listener, tmp_path):
    """The launcher's question is another one each time."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def relay():
            agent, _ = middle.accept()
            with agent, socket.create_connection(place(listener)) as launcher:
                agent.sendall(launcher.recv(100))
                heard.append(agent.recv(300))

        thread = threading.Thread(target=relay)
        thread.start()
        credentials = json.dumps({**json.loads(listener.credentials()), "addresses": [list(middle.getsockname())]})
        with pytest.raises(OSError):
            call(listener, tmp_path, credentials=credentials)
        thread.join()
    with socket.create_connection(place(listener)) as thief:
        thief.recv(100)
        thief.sendall(heard[0])
        assert closed(thief) and admitted(listener, timeout=0.2) == []


GARBAGE = {
    "a word that is not ASCII": b"0 \xff x\n",
    "not ASCII at all": "0 ä ö\n".encode(),
    "a number that is none": b"\xb2 a b\n",
    "too few words": b"0\n",
    "too many words": b"0 a b c\n",
    "nothing": b"\n",
    "zeros": b"\0" * 200 + b"\n",
    "a huge number": b"9" * 200 + b" a b\n",
    "a huge line": b"x" * (4 << 20),
    "a request of a browser": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "more behind the line": b"0 a b\nand more\n",
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_caller_and_nothing_else(listener, tmp_path, sent):
    with socket.create_connection(place(listener)) as stranger:
        try:
            stranger.sendall(sent)
        except OSError:  # it was cut off in the middle of it
            pass
        assert closed(stranger)
    with call(listener, tmp_path, 3):
        assert [link.hosts for link in admitted(listener)] == [(3,)]


def test_a_slow_drip_keeps_nobody_waiting_and_has_a_deadline(listener, tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "PATIENCE", 5.0)
    with socket.create_connection(place(listener)) as drip:
        end, happened = time.monotonic() + 200, []

        def slowly():
            try:
                while time.monotonic() < end:
                    drip.sendall(b"0")
                    time.sleep(0.2)
            except OSError:
                happened.append("cut off")

        thread = threading.Thread(target=slowly)
        thread.start()
        with call(listener, tmp_path, 1):
            happened += ["let in"] * len(admitted(listener))
        thread.join()
    assert happened == ["let in", "cut off"]


def test_many_connections_are_capped_and_agents_still_come_in(listener, tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "PATIENCE", 1000.0)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(place(listener)) for _ in range(3 * listening.CALLERS)]
    try:
        with call(listener, tmp_path, 2):
            assert len(admitted(listener)) == 1
        held = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        assert held <= listening.CALLERS + 2
        assert closed(strangers[0])  # the one that has waited longest
    finally:
        for each in strangers:
            each.close()


def test_no_descriptor_left_is_outlived(listener, tmp_path, monkeypatch):
    failures = [errno.EMFILE] * 5
    accept = socket.socket.accept

    def scarce(self):
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with call(listener, tmp_path, 4):
        assert len(admitted(listener)) == 1 and not failures


def test_it_listens_where_it_is_told_to_and_stops_when_told_to(tmp_path):
    listener = AgentListener(["127.0.0.1"])
    _, port = place(listener)
    others = [
        each.address for each in network.addresses() if not each.address.startswith("127.") and ":" not in each.address
    ]
    for address in ("127.0.0.2", *others):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=60)
    with call(listener, tmp_path) as agent:
        (link,) = admitted(listener)
        listener.shut()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        link.send({"type": "start"})
        assert decode(agent.recv(100).rstrip(b"\n")) == {"type": "start"}
        listener.close()
        assert closed(agent)


def test_addresses_towards_hosts(monkeypatch):
    assert network.towards(["127.0.0.1"]) == ["127.0.0.1"]
    assert network.towards(["localhost", "127.0.0.1"])[-1] in ("127.0.0.1", "::1")
    assert network.towards(["no-such-host.invalid"], "lo") == [
        e.address for e in network.addresses() if e.interface == "lo"
    ]
    known = [network.Address("eth0", "10.0.0.5", 24), network.Address("lo", "127.0.0.1", 8)]
    monkeypatch.setattr(network, "addresses", lambda: known)
    monkeypatch.setattr(network, "_own_address_towards", lambda name: {"a": "127.0.0.1", "b": "10.0.0.5"}.get(name))
    assert network.towards(["a", "b", "a"]) == ["10.0.0.5", "127.0.0.1"]
    assert network.towards(["a"], "eth0") == ["10.0.0.5"] and network.towards(["c"]) == ["10.0.0.5"]


# -- a whole run -------------------------------------------------------------------------------------------------------

MPIRUN = """#!/bin/sh
# Starts an agent per host here, as mpirun does there.
echo "$JOB_CREDENTIALS" > "$NOTES/credentials.$(ls "$NOTES" | grep -c credentials)"
while [ ! -e "$NOTES/go" ]; do sleep 0.05; done
for index in 0 1; do
  OMPI_COMM_WORLD_RANK=$index {python} -u {deepy} --agent --index OMPI_COMM_WORLD_RANK --credentials JOB_CREDENTIALS &
done
wait
"""


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """A folder for a job whose two "hosts" are this machine, and agents that call back."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mpirun", "mpirun.openmpi"):
        (programs / name).write_text(MPIRUN.format(python=sys.executable, deepy=ROOT / "deepy.py"))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    return ("--hostfile", "hosts", "--runner", "openmpi", "--master-address", "127.0.0.1")


def credentials_text(job: Job, number: int) -> dict:
    return json.loads((job.notes / f"credentials.{number}").read_text())


def credentials_of(job: Job, number: int) -> dict:
    """The credentials of a start, as soon as they are there."""
    path, end = job.notes / f"credentials.{number}", time.monotonic() + 300
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < end and job.process.poll() is None, job.finish(1)
        time.sleep(0.02)
    return credentials_text(job, number)


@pytest.mark.tour
def test_a_run_under_attack_starts_and_ends_well(tmp_path, mpirun):
    job = Job(tmp_path, "describe", ranks=1, options=mpirun)
    attackers, over = [], threading.Event()
    try:
        credentials = credentials_of(job, 0)
        (where,) = [tuple(each) for each in credentials["addresses"] if each[0] == "127.0.0.1"]

        def attack(number: int) -> None:
            sent = list(GARBAGE.values())
            while not over.is_set():
                try:
                    with socket.create_connection(where, timeout=1) as stranger:
                        stranger.settimeout(1)
                        if number % 2:
                            stranger.sendall(sent[number % len(sent)])
                            closed(stranger, 0.5)
                        else:  # says nothing, slowly
                            over.wait(0.3)
                except OSError:
                    over.wait(0.02)
                number += 2

        attackers = [threading.Thread(target=attack, args=(number,)) for number in range(8)]
        for each in attackers:
            each.start()
        time.sleep(1.0)
        assert job.process.poll() is None
        (job.notes / "go").touch()
        job.note("given.1")
        status, _, error = job.finish()
        assert status == 0, error
    finally:
        over.set()
        for each in attackers:
            each.join()
        job.finish(1)


@pytest.mark.tour
def test_it_listens_on_the_chosen_address_until_all_agents_are_in(tmp_path, mpirun):
    job = Job(tmp_path, "trainer", ranks=1, options=mpirun)
    places = credentials_of(job, 0)["addresses"]
    assert places and all(address in ("127.0.0.1", "::1") for address, _ in places)
    others = [each.address for each in network.addresses() if each.interface != "lo"]
    for other in others:  # this machine's other addresses
        for _, port in places:
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=60)
    socket.create_connection(tuple(places[0]), timeout=60).close()
    (job.notes / "go").touch()
    for rank in range(2):
        job.note(f"up.{rank}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(tuple(places[0]), timeout=60)
    job.process.terminate()
    assert job.finish()[0] == 143


@pytest.mark.tour
def test_it_listens_again_for_a_restart_with_another_secret(tmp_path, mpirun):
    job = Job(tmp_path, "flaky", ranks=1, options=(*mpirun, "--restarts", "2"), overrides=("launch.restart_delay=0.1",))
    (job.notes / "go").touch()
    status, _, error = job.finish()
    assert status == 0, error
    assert len({credentials_text(job, attempt)["secret"] for attempt in range(3)}) == 3
