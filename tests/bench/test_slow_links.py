"""Links with a rate and a delay: when a packet passes, bytes that arrive whole, and the table of the measurement."""

from __future__ import annotations

import os
import random
import socket
import threading

import pytest

from bench.links.peer_events import table as events
from bench.links.slow_links import ONE, draw, table
from bench.links.wire import QUEUE, Link, Paths, Wire


def test_a_link_has_a_rate_and_a_queue():
    link = Link(1000.0)
    assert [link.passed(0.0, 100) for _ in range(4)] == [0.1, 0.2, pytest.approx(0.3), None]
    assert link.passed(5.0, 100) == 5.1 and QUEUE == 0.2


def test_a_full_link_of_one_host_delays_no_packet_of_another():
    """Both send to the third, whose link costs nothing."""
    paths = Paths([1e12, 1000.0, 1000.0], [0.0, 0.01, 0.02])
    for number in range(3):
        paths.send(0.0, 1, 0, bytes([number]) * 100)
    paths.send(0.05, 2, 0, b"x" * 10)
    assert [packet[0] for _, packet in paths.due(0.07)] == [] and paths.rest(0.07) == pytest.approx(0.01)
    assert [packet[0] for _, packet in paths.due(0.1)] == [ord("x")]
    assert [packet[0] for _, packet in paths.due(0.35)] == [0, 1, 2] and paths.rest(0.4) == 1.0


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="needs root and /dev/net/tun")
def test_bytes_pass_whole_between_namespaces():
    """More than the queue holds, so packets are dropped and sent again."""
    sent = random.Random(1).randbytes(1 << 20)
    with Wire.star(2, 50e6, 0.002) as wire:
        server = wire.places[0].call(socket.create_server, (wire.addresses[0], 7000))
        got = bytearray()

        def receive() -> None:
            with server.accept()[0] as connection:
                while part := connection.recv(1 << 16):
                    got.extend(part)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        with wire.places[1].call(socket.create_connection, (wire.addresses[0], 7000)) as connection:
            connection.sendall(sent)
        thread.join(60)
        server.close()
        up, down = wire.bytes()[1]
        assert bytes(got) == sent and up > len(sent) > down > 0 and wire.bytes()[2] == (0, 0)
        wire.cut(1, True)
        with pytest.raises(TimeoutError):
            wire.places[1].call(socket.create_connection, (wire.addresses[0], 7000), 0.2)


def test_the_table_has_medians_of_losses_and_of_links(tmp_path):
    made = [{"row": ONE, "seed": seed, "steps": 300, "corpus": 9, "loss": 2.0 + seed / 10} for seed in (1, 2, 3)]
    made += [
        {"row": "diloco:30", "seed": seed, "steps": 300, "corpus": 9, "loss": 2.5 + seed / 10} for seed in (1, 2, 3)
    ]
    link = {"utilisation": 0.5, "seconds": 0.25, "sent": 1e4, "received": 4e4}
    made.append({"row": "diloco:30", "seed": 1, "steps": 60, "corpus": 9, "loss": 3.0, **link})
    rows = table(made).splitlines()
    assert rows[2] == "| one process | 2.200 (2.100 – 2.300) |  |  |  |  |  |"
    assert rows[3] == "| `diloco`, H = 30 | 2.700 (2.600 – 2.800) | +0.500 | 50.0% | 0.25 | 10.0 kB | 40.0 kB |"
    draw(tmp_path / "a.svg", made)
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_the_table_of_events_has_the_lines_of_the_ledger():
    made = {"utilisation": 0.5, "seconds": 0.25, "sent": 1e4, "received": 4e4, "equal": 4}
    rows = events({**made, "lines": [["a"], ["a", "b"]], "absent": [{"b": "silent"}, {}]}, 2).splitlines()
    assert rows[2:4] == ["| 0 | 1 | b: silent |", "| 1 | 2 |  |"]
    assert rows[-1].endswith("4 of 4 runs have the same common weights")
