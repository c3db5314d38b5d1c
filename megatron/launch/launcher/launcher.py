"""The launcher: starts one agent per host, waits until all are ready, starts the ranks, and sees them to their end."""

from __future__ import annotations

import resource
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.worker import network

from ..report.console import (
    FORWARDED_SIGNALS,
    HOST_LOST,
    LEFT,
    STOP_SIGNALS,
    STOPPED,
    Failure,
    RankConsole,
    exit_status,
    log,
    outcome,
    stopped,
)
from ..watch.watch import InquirySocket, RankWatch, of_ranks
from ..wire.listener import AgentListener
from ..wire.protocol import Command, Connection, MessagePipe, caught_signals
from ..wire.specification import Specification

if TYPE_CHECKING:
    from megatron.config.sections.layout import LaunchSection

AT_ONCE = 64  # connections that are being made at the same time
BEAT = 5.0
AFTER_GRACE = 15.0  # seconds that an agent may take beyond the grace before it is given up
LAST_WORDS = 5.0  # seconds that other hosts have to fail too, before a start is given up
FAILURE_GRACE = 5.0  # seconds between the stop and the kill of ranks whose peer has failed


@dataclass
class HostState:
    """The launcher's state of a host."""

    name: str
    phase: str = "starting"  # then "ready", "running", "done" or "lost"
    addresses: list[network.Address] = field(default_factory=list)
    code: str = ""
    offset: float = float("inf")  # the launcher's clock minus the host's, at least
    heard: float = 0.0
    link: MessagePipe | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended. Times are in seconds since the epoch."""

    status: int
    first: Failure | None  # the one to show
    failures: tuple[Failure, ...]
    signals: tuple[int, ...]  # forwarded stop signals
    seconds: float
    started: bool
    since: float = 0.0
    ended: float = 0.0


class Launcher:
    """One start of a job on its hosts. `run` does it all, in one thread.

    Args:
        hang: the reaction to ranks that hang: "report", "stop" or "off".
    """

    def __init__(
        self,
        job: Specification,
        commands: list[Command],
        settings: LaunchSection,
        listener: AgentListener | None = None,
        hang: str = "off",
    ) -> None:
        self.job, self.settings, self.listener = job, settings, listener
        self.waiting = list(commands)
        self.connections: list[Connection] = []
        self.hosts = [HostState(host.name) for host in job.hosts]
        self.console = RankConsole(job.plain)
        self.selector = selectors.DefaultSelector()
        self.failures: list[Failure] = []
        self.tails: dict[int, str] = {}
        self.shown: set[int] = set()  # ranks whose last words were on the console
        self.signals: list[int] = []
        self.received: dict[int, float] = {}
        self.begin = self.beat_at = self.ticked = time.monotonic()
        self.deadline: float | None = None
        self.give_up_at = float("inf")
        self.started = self.stopping = self.quiet = False
        folder = Path(job.directory, job.logs).parent if job.logs else None
        self.watch = RankWatch(self, folder, hang)
        self.window = InquirySocket(of_ranks(self.watch), self.selector, folder)
        self.meeting: dict | None = None  # where ranks meet, once all hosts are ready

    def run(self) -> Result:
        """Start the job and wait for its end."""
        _raise_file_limit(4 * len(self.hosts) + 64)
        restore = self._catch_signals()
        try:
            if self.listener:
                listener = self.listener
                self.selector.register(listener.ready, selectors.EVENT_READ, lambda: self._visitors(listener))
            while not all(host.phase in ("done", "lost") for host in self.hosts):
                self._start_waiting()
                for key, _ in self.selector.select(0.2):
                    key.data()
                self._tick()
            self._close_all()
        finally:
            for connection in self.connections:
                if connection.process.poll() is None:
                    connection.close(signal.SIGKILL)
                connection.release()
            restore()
            self.window.close()
            self.selector.close()
        status, first = outcome(self.failures, self.signals)
        if first is not None and (told := self.watch.explained(first)) is not first:
            status, first = exit_status(told.status), told
        if status == 0 and self.signals and not self.started:
            status = 128 + self.signals[0]
        now = time.time()
        since = float(self.job.environment.get("JOB_SINCE", now))
        seconds = time.monotonic() - self.begin
        return Result(status, first, tuple(self.failures), tuple(self.signals), seconds, self.started, since, ended=now)

    # ---- the loop

    def _catch_signals(self) -> Callable[[], None]:
        # Under nohup a lost terminal is no reason to stop.
        numbers = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        ours, restore = caught_signals((*numbers, signal.SIGCHLD, signal.SIGWINCH))
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._signals(ours.recv(4096)))
        return restore

    def _start_waiting(self) -> None:
        """Make connections, not too many at once."""
        while self.waiting and sum(host.phase == "starting" and host.link is not None for host in self.hosts) < AT_ONCE:
            command = self.waiting.pop(0)
            try:
                connection = Connection(command)
            except OSError as error:
                for index in command.hosts:
                    self._lost(index, f"cannot start {command.arguments[0]}: {error.strerror}")
                continue
            self.connections.append(connection)
            self._listen(connection.link, connection)
            self._listen(connection.errors, connection)
            if not command.dials:
                for index in command.hosts:
                    self.hosts[index].link = connection.link
                connection.link.send(self.job.to_message(command.index))

    def _listen(self, link: MessagePipe, connection: Connection | None) -> None:
        self.selector.register(link.source, selectors.EVENT_READ, lambda: self._read(link, connection))

    def _visitors(self, listener: AgentListener) -> None:
        for link in listener.admitted():
            index = link.hosts[0]
            if not 0 <= index < len(self.hosts) or self.hosts[index].link:
                log(f"an agent called as host {index}, which is not expected (ignored)")
                continue
            self.hosts[index].link = link
            self._listen(link, None)
            link.send(self.job.to_message(index))
        if all(host.link for host in self.hosts):
            listener.shut()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.ticked > BEAT:  # we were suspended ourselves: silence says nothing
            for host in self.hosts:
                host.heard = now
        self.ticked = now
        for link in self._links():
            if now - self.beat_at > BEAT:
                link.send({"type": "beat"})
            link.flush()
        self.beat_at = now if now - self.beat_at > BEAT else self.beat_at
        for connection in self.connections:
            if connection.ended:
                self._command_ended(connection)
        self.console.settle()
        self.watch.tick(now)
        for index, host in enumerate(self.hosts):
            limit = self.settings.heartbeat
            if limit and host.phase in ("ready", "running") and now - host.heard > limit:
                self._lost(index, f"nothing was received from its agent for {limit:.0f} s (launch.heartbeat)")
        if not self.started and not self.stopping:
            self._start_if_ready(now)
        if self.deadline is not None and now > self.deadline:
            for index, host in enumerate(self.hosts):
                if host.phase not in ("done", "lost"):
                    self._lost(index, "its agent did not end in time")

    def _start_if_ready(self, now: float) -> None:
        slow = [index for index, host in enumerate(self.hosts) if host.phase == "starting"]
        if slow and now - self.begin > self.settings.start_timeout:
            for index in slow:
                self._lost(
                    index, f"its agent was not ready within {self.settings.start_timeout:.0f} s (launch.start_timeout)"
                )
        if self.failures and (not slow or now > self.give_up_at):
            self._stop_all(0.0)
        if slow or self.stopping or self.meeting is not None:
            return
        try:
            self.meeting = self._rendezvous()
        except ValueError as error:
            self._fail(0, str(error))
            return
        address, port = self.meeting["master_address"], self.settings.master_port or 0
        first = self.hosts[0].link
        assert first is not None  # all hosts are ready
        first.send({"type": "bind", "to": 0, "address": address, "port": port})

    def _start(self, port: int) -> None:
        if self.started or self.stopping or self.meeting is None:
            return
        self.started = True
        for host in self.hosts:
            host.phase = "running"
        places = self.meeting["places"]
        for link in self._links():  # an agent knows only its own network
            own = {str(index): places[str(index)] for index in link.hosts if str(index) in places}
            link.send({"type": "start", **self.meeting, "places": own, "master_port": port})

    def _rendezvous(self) -> dict:
        """Where rank 0 listens, from what the hosts said of themselves.

        Raises:
            ValueError: hosts with other code, or without a network in common.
        """
        other = [host.name for host in self.hosts if host.code != self.job.code]
        if other and self.settings.check_code:
            raise ValueError(
                f"the source code on {', '.join(other[:8])} differs from the launcher's: "
                "bring all hosts to the same commit (or launch.check_code=false)"
            )
        address, chosen = self.settings.master_address, None
        if len(self.hosts) == 1:
            address = address or "127.0.0.1"
        else:
            chosen = self._common_network()
            if chosen is None and address is None:
                raise ValueError("the hosts share no network: set launch.master_address, or launch.interface")
            if chosen:
                address = address or chosen[0].address
        return {
            "master_address": address,
            "places": {str(index): [each.interface, each.address] for index, each in enumerate(chosen or ())},
        }

    def _common_network(self) -> list[network.Address] | None:
        known, wanted = [host.addresses for host in self.hosts], self.settings.interface
        chosen = network.shared_network(known, wanted, self.settings.master_address or _resolve(self.hosts[0].name))
        if chosen is None and wanted:
            without = [host.name for host in self.hosts if all(each.interface != wanted for each in host.addresses)]
            raise ValueError(f"no address on interface {wanted} (launch.interface) on {', '.join(without[:8])}")
        return chosen

    # ---- what is heard

    def _read(self, link: MessagePipe, connection: Connection | None) -> None:
        for message in link.receive():
            if isinstance(message, bytes):
                self._chatter(message, connection)
            else:
                try:
                    self._hear(message, link)
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    self._fail(link.hosts[0], f"its agent sent something without sense: {error!r}")
        if not link.open:
            self.selector.unregister(link.source)
            if connection is None:  # an agent that had called
                for index in link.hosts:
                    self._lost(index, "its agent ended without a word")

    def _chatter(self, line: bytes, connection: Connection | None) -> None:
        """Lines of ssh, srun or mpirun themselves."""
        text = line.decode(errors="replace").rstrip()
        if connection is None or not text:
            return
        connection.said.append(text)
        if self.quiet:
            return
        names = ", ".join(self.job.hosts[index].name for index in connection.command.hosts[:2])
        log(f"[{names}{', ...' if len(connection.command.hosts) > 2 else ''}] {text}")

    def _hear(self, message: dict, link: MessagePipe) -> None:
        index, kind = message.get("host"), message["type"]
        if not isinstance(index, int) or index not in link.hosts:
            if kind == "problem":  # an agent that does not know which host it is
                self._fail(link.hosts[0], message["text"])
            return
        host = self.hosts[index]
        host.heard = time.monotonic()
        if kind == "output":
            self.console.show(host.name, message["rank"], message["stream"], message["text"])
        elif kind == "address":
            host.addresses.append(network.Address(*message["address"]))
        elif kind == "ready":
            host.code, host.phase = message["code"], "ready"
            host.offset = time.time() - message["time"]
        elif kind in ("place", "seen", "late", "beat"):
            self.watch.hear(index, message)
        elif kind == "bound":
            self._start(int(message["port"]))
        elif kind == "tail":
            self.tails[message["rank"]] = self.tails.get(message["rank"], "") + message["text"]
            if message["shown"]:
                self.shown.add(message["rank"])
        elif kind == "exit":
            self._rank_ended(host, message)
        elif kind == "signalled":
            if message["number"] not in self.signals:
                self.signals.append(message["number"])  # it came from the scheduler, past us
        elif kind == "warning":
            log(f"warning: [{host.name}] {message['text']}")
        elif kind == "problem":
            self._fail(index, message["text"])
        elif kind == "done":
            host.phase = "done"

    def _rank_ended(self, host: HostState, message: dict) -> None:
        host.offset = min(host.offset, time.time() - message["now"])
        if message["status"] == 0:
            return
        rank, status, step = message["rank"], message["status"], message.get("step")
        obeyed = self.stopping and stopped(status, (signal.SIGTERM, signal.SIGKILL))
        reason = f"it had not ended {self.job.grace:.0f} s after the signal (launch.grace)" * message["late"]
        reason = STOPPED if obeyed else LEFT * bool(message.get("early")) or reason
        when, words = message["time"] + host.offset, self.tails.get(rank, "")
        self.failures.append(Failure(when, host.name, rank, status, reason, words, step, shown=rank in self.shown))
        if not stopped(status, self.signals):  # one that obeyed a signal is no reason to hurry the others
            self._stop_all(FAILURE_GRACE)

    # ---- how it ends

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGWINCH in numbers and any(self.job.terminal):
            columns, rows = shutil.get_terminal_size()
            self.broadcast({"type": "size", "rows": rows, "columns": columns})
        for number in sorted(set(numbers) & {int(each) for each in FORWARDED_SIGNALS}):
            name = signal.Signals(number).name
            now, before = time.monotonic(), [at for each, at in self.received.items() if each in STOP_SIGNALS]
            if now - self.received.get(number, -10.0) < 0.3:  # schedulers may send the same one along several ways
                continue
            self.received[number] = now
            again = number in STOP_SIGNALS and bool(before)
            self.signals.append(number)
            if again or not self.started:
                log(f"{name}: ending all ranks at once" if again else f"{name} before the start: nothing is started")
                self._stop_all(0.0)
            else:
                log(
                    f"{name}: passed on to {self._reached(now)}"
                    + (f". They have {self.job.grace:.0f} s" if number in STOP_SIGNALS else "")
                )
                self.broadcast({"type": "signal", "number": number})
                if number in STOP_SIGNALS:
                    self._end_by(self.job.grace + AFTER_GRACE)

    def _reached(self, now: float) -> str:
        """The hosts whose ranks get a forwarded signal: those with recent messages of their agents."""
        mute = [host.name for host in self.hosts if host.phase == "running" and now - host.heard > 2 * BEAT]
        return "all ranks" + (f" except on {', '.join(mute[:8])}, whose agent does not answer" if mute else "")

    def _stop_all(self, grace: float) -> None:
        """End every rank: at once, or by a stop signal and the kill after `grace` seconds."""
        if self.stopping and grace:
            return
        self.stopping = True
        self.waiting.clear()
        for host in self.hosts:
            if host.link is None and host.phase == "starting":
                host.phase = "lost"
        self.broadcast({"type": "stop", "grace": grace} if grace and self.started else {"type": "kill"})
        self._end_by(grace + AFTER_GRACE)
        if not self.started:  # nothing runs yet: what is left are agents, or commands on their way to them
            for link in {id(host.link): host.link for host in self.hosts if host.link}.values():
                link.flush()
            for connection in self.connections:
                connection.close(signal.SIGTERM)

    def _end_by(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.deadline = at if self.deadline is None else min(at, self.deadline)

    def broadcast(self, message: dict) -> None:
        """Send a message to all agents."""
        for link in self._links():
            link.send(message)

    def _links(self) -> list[MessagePipe]:
        """Send to all agents. Some share a link."""
        return list({id(host.link): host.link for host in self.hosts if host.link}.values())

    def end_for(self, failure: Failure) -> None:
        """End the run for a reason that no rank gives."""
        self.failures.append(failure)
        self._stop_all(FAILURE_GRACE)

    def _fail(self, index: int, reason: str) -> None:
        self.failures.append(Failure(time.time(), self.hosts[index].name, None, HOST_LOST, reason))
        self.hosts[index].phase = "lost"
        if self.started:
            self._stop_all(FAILURE_GRACE)
        elif self.give_up_at == float("inf"):  # the other hosts may have something to say too: all mistakes at once
            self.give_up_at = time.monotonic() + LAST_WORDS

    def _lost(self, index: int, reason: str) -> None:
        if self.hosts[index].phase in ("done", "lost"):
            return
        if not self.started and (self.signals or self.stopping):
            self.hosts[index].phase = "lost"
        else:
            self._fail(index, reason)

    def _command_ended(self, connection: Connection) -> None:
        status = connection.process.returncode
        for index in connection.command.hosts:
            said = " / ".join(list(connection.said)[-3:])
            self._lost(
                index, f"{connection.command.arguments[0]} ended with status {status}" + (f": {said}" if said else "")
            )

    def _close_all(self) -> None:
        """Let the commands end by themselves, reading their last lines, and then end them."""
        deadline = time.monotonic() + (0.5 if self.failures and not self.started else AFTER_GRACE)
        for connection in self.connections:
            if connection.process.stdin:
                connection.process.stdin.close()
                connection.process.stdin = None
        while time.monotonic() < deadline and any(each.process.poll() is None for each in self.connections):
            for key, _ in self.selector.select(0.05):
                key.data()
        self.console.close()


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
