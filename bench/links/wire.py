"""Network namespaces on links with a rate and a delay, for kernels without `tc netem`. Needs root.

A router in user space reads each packet from a TUN device, and writes it to the one of its destination when it is due.
TCP therefore sees the delay in handshakes, windows and retransmissions, as over a long link.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SET_DEVICE, TUN_WITHOUT_HEAD = 0x400454CA, 0x1001  # TUNSETIFF, IFF_TUN | IFF_NO_PI
UNIT = 9000  # bytes of a packet: fewer packets cost the router less
QUEUE = 0.2  # seconds of data that wait before a link. More is dropped, as by `tc tbf latency 200ms`


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def enter(place: str) -> None:
    """Move this thread, and the threads that it starts, into a namespace."""
    file = os.open(place, os.O_RDONLY)
    _call("setns", file, NEW_NETWORK)
    os.close(file)


class Namespace:
    """A network of its own, which ends with this process. `place` is a path by which other processes enter it."""

    def __init__(self) -> None:
        def make() -> int:
            _call("unshare", NEW_NETWORK)
            return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)

        with ThreadPoolExecutor(1) as thread:
            self._file = thread.submit(make).result()
        self.place = f"/proc/{os.getpid()}/fd/{self._file}"
        self.call(_ip, "link", "set", "lo", "up")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in the namespace. Sockets and devices that it makes stay there."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(enter, self.place).result()
            return thread.submit(function, *arguments).result()

    def close(self) -> None:
        os.close(self._file)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tunnel(address: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET_DEVICE, struct.pack("16sH22x", b"link0", TUN_WITHOUT_HEAD))
    _ip("addr", "add", f"{address}/24", "dev", "link0")
    _ip("link", "set", "link0", "mtu", str(UNIT), "up")
    return file


@dataclass
class Link:
    """One direction of a link.

    Attributes:
        rate: bytes per second.
        free: when the last packet has passed.
    """

    rate: float
    free: float = field(default=0.0)

    def passed(self, at: float, size: int) -> float | None:
        """When a packet that arrives at a time has passed. None: the queue is full, and it is dropped."""
        if self.free - at > QUEUE:
            return None
        self.free = max(self.free, at) + size / self.rate
        return self.free


class Paths:
    """Packets between hosts: each passes the link of its source, the delays of both, and the link of its destination.

    Packets of several sources pass the link of one destination in the order in which they come to it.

    Args:
        rates: bytes per second of each link, in each direction.
        delays: seconds of each link, in each direction.
    """

    def __init__(self, rates: Sequence[float], delays: Sequence[float]) -> None:
        self._up, self._down = ([Link(rate) for rate in rates] for _ in range(2))
        self._delays, self._numbers = delays, itertools.count()
        # time, order, destination, packet, whether it has passed the destination's link
        self._waiting: list[tuple[float, int, int, bytes, bool]] = []

    def send(self, now: float, source: int, to: int, packet: bytes) -> None:
        at = self._up[source].passed(now, len(packet))
        if at is not None:
            self._push(at + self._delays[source] + self._delays[to], to, packet, False)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Destination and content of each packet that has come by a time, in order."""
        while self._waiting and self._waiting[0][0] <= now:
            at, _, to, packet, passed = heapq.heappop(self._waiting)
            if passed:
                yield to, packet
            elif (end := self._down[to].passed(at, len(packet))) is not None:
                self._push(end, to, packet, True)

    def rest(self, now: float) -> float:
        """Seconds until a packet moves, at most one."""
        return min(max(self._waiting[0][0] - now, 0.0), 1.0) if self._waiting else 1.0

    def _push(self, at: float, to: int, packet: bytes, passed: bool) -> None:
        heapq.heappush(self._waiting, (at, next(self._numbers), to, packet, passed))


class Wire:
    """Namespaces with addresses 10.79.0.1, 10.79.0.2, ... and a router between them. A context manager.

    Args:
        rates: bits per second of the link of each, in each direction.
        delays: seconds between each and the router, in each direction.
    """

    def __init__(self, rates: Sequence[float], delays: Sequence[float]) -> None:
        self.rates, self.delays = [each / 8 for each in rates], list(delays)
        self.addresses = [f"10.79.0.{place + 1}" for place in range(len(rates))]
        self.places = [Namespace() for _ in rates]
        self._files = [place.call(_tunnel, address) for place, address in zip(self.places, self.addresses)]
        context = get_context("fork")
        self._counts = context.Array("Q", 2 * len(rates), lock=False)
        self._cut = context.Array("B", len(rates), lock=False)
        self._router = context.Process(target=self._route, args=(os.getpid(),), daemon=True)

    @classmethod
    def star(cls, count: int, rate: float, delay: float) -> Wire:
        """Links of `count` hosts to one, the first, whose own link costs nothing."""
        return cls([1e12, *[rate] * count], [0.0, *[delay] * count])

    def __enter__(self) -> Wire:
        self._router.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._router.kill()
        self._router.join()
        for file in self._files:
            os.close(file)
        for place in self.places:
            place.close()

    def bytes(self) -> list[tuple[int, int]]:
        """Bytes that each has sent and received so far, with heads of packets."""
        return [(self._counts[2 * place], self._counts[2 * place + 1]) for place in range(len(self.places))]

    def cut(self, place: int, cut: bool) -> None:
        """Cut a link, or repair it. No side gets an error, as without a cable."""
        self._cut[place] = cut

    def _route(self, parent: int) -> None:
        paths, selector = Paths(self.rates, self.delays), selectors.DefaultSelector()
        known = {socket.inet_aton(address): place for place, address in enumerate(self.addresses)}
        for place, file in enumerate(self._files):
            selector.register(file, selectors.EVENT_READ, place)
        while os.getppid() == parent:
            for key, _ in selector.select(paths.rest(time.monotonic())):
                packet, now = os.read(key.fd, 1 << 16), time.monotonic()
                to = known.get(packet[16:20])
                if packet[0] >> 4 == 4 and to is not None and not self._cut[key.data]:
                    self._counts[2 * key.data] += len(packet)
                    paths.send(now, key.data, to, packet)
            for to, packet in paths.due(time.monotonic()):
                if not self._cut[to]:
                    self._counts[2 * to + 1] += len(packet)
                    os.write(self._files[to], packet)
