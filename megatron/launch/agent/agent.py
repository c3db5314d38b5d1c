"""The agent: one per host, it starts the host's ranks, passes on what they say, and ends them.

It is started by a command that is the same for every job. The job comes over its input, which then stays open: its end
means that the launcher is gone. One thread and one event loop, so that nothing can race."""

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.installation import code_version
from megatron.report.append import AppendFile
from megatron.worker import devices, network
from megatron.worker.rendezvous import SOCKET

from ..report.console import COMPLAINT, FORWARDED_SIGNALS, KILLS, STOP_SIGNALS
from ..wire.protocol import MessagePipe, caught_signals, encode, encode_text
from ..wire.specification import Seat, Specification, seat_in
from .rank_probe import Sight
from .ranks import TRACEBACK, OutputStream, RankObserver, RankProcess, become_subreaper, children, rank_environment

OUTPUT_LIMIT = 16 << 20  # bytes kept for a launcher that does not read. Further ones are only in the log files
HOLD = 3.0  # seconds that a traceback of the speaking rank waits for the rank's end before it is shown
BEAT = 5.0  # seconds between signs of life
COMPLAINTS = 600.0  # seconds between two complaints of one kind about log files
AFTER_LOSS = 10.0  # seconds that the ranks' end may take beyond the grace


class Agent:
    """The event loop of one host.

    Args:
        source, target: descriptors on which the launcher writes and reads.
        index: which host this is, where the specification does not say it.
        name: the host's, where it is to be found in the specification.
    """

    def __init__(self, source: int, target: int, index: int | None = None, name: str | None = None) -> None:
        self.link, self.index, self.name = MessagePipe(source, target), index, name
        self._job: Specification | None = None
        self._seat: Seat | None = None
        self.ranks: list[RankProcess] = []
        self.seen: RankObserver | None = None
        self.dropped = False
        self.selector = selectors.DefaultSelector()
        self.heard = self.beat_at = time.monotonic()
        self.orphans_at = time.monotonic() + BEAT
        self.kill_at: float | None = None
        self.killing = False
        self.connected, self.finished, self.told_tail = True, False, False
        self.recent_signals: dict[int, float] = {}
        self.complained: dict[str, float] = {}  # when, by what was said
        self.configuration: int | None = None  # descriptor of the file that ranks read
        self.meeting: socket.socket | None = None  # bound for rank 0's store

    @property
    def job(self) -> Specification:
        """The launcher's specification. ValueError before it has come."""
        if self._job is None:
            raise ValueError("the launcher has not said what to start")
        return self._job

    @property
    def seat(self) -> Seat:
        """This host's index in the job. ValueError before it is known."""
        if self._seat is None:
            raise ValueError("the launcher has not said which host this is")
        return self._seat

    # ---- the loop

    def run(self) -> int:
        """Serve until all ranks have ended, and return the agent's own exit status."""
        become_subreaper()
        wake = self._catch_signals()
        self.selector.register(self.link.source, selectors.EVENT_READ, self._from_launcher)
        self.selector.register(wake, selectors.EVENT_READ, self._from_signals)
        try:
            while not self.finished:
                ready = self.selector.select(self._pause())
                self._reap()  # before their peers' complaints are read, so that who died first is also seen first
                for key, mask in ready:
                    if key.fd not in self.selector.get_map():  # of a rank that has just ended
                        continue
                    if mask & selectors.EVENT_WRITE:
                        self._flush()
                    if mask & selectors.EVENT_READ:
                        key.data()
                self._tick()
            self._last_flush()
        finally:
            self._sweep()
            if self.configuration is not None:
                os.close(self.configuration)
        return 0

    def _pause(self) -> float:
        return (
            0.05
            if self.kill_at or (self.seen and self.seen.waiting) or any(s.held for r in self.ranks for s in r.streams)
            else 1.0
        )

    def _catch_signals(self) -> socket.socket:
        self._wake, self._restore = caught_signals((*FORWARDED_SIGNALS, signal.SIGCHLD))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return self._wake

    def _from_signals(self) -> None:
        try:
            numbers = set(self._wake.recv(4096))
        except BlockingIOError:
            return
        for number in numbers & {int(each) for each in FORWARDED_SIGNALS}:
            self._pass_on(number)

    def _tick(self) -> None:
        now = time.monotonic()
        self._reap()
        for rank in self.ranks:
            for stream in rank.streams:
                if stream.held and rank.alive and now - stream.held_since > HOLD:
                    self._show(rank, stream, b"".join(stream.held))
                    stream.held.clear()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at, self.killing = None, True
            self._signal_all(signal.SIGKILL)
        if now - self.beat_at > BEAT:
            self.beat_at = now
            for notes in (self.seen.beat() if self.seen else []) or [[]]:
                self._send({"type": "beat", "at": notes})
        for line in self.seen.due() if self.seen else ():
            self._queue(line)
        silence = self._job.heartbeat if self._job else 0.0
        if self.connected and silence and now - self.heard > silence:
            self._launcher_lost()
        if self.ranks and not any(rank.alive for rank in self.ranks):
            self._send({"type": "done"})
            self.finished = True

    # ---- the launcher's side

    def _from_launcher(self) -> None:
        for message in self.link.receive():
            if isinstance(message, dict):
                self.heard = time.monotonic()
                self._obey(message)
        if not self.link.open:
            self._launcher_lost()

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        try:
            if kind == "specification":
                self._prepare(message)
            elif kind == "bind" and message["to"] == self.index:
                self._bind(str(message["address"]), int(message["port"]))
            elif kind == "start":
                self._start(message)
            elif kind == "look" and self.seen:
                self.seen.ask(int(message["request"]), str(message["stacks"]))
            elif kind == "signal":
                self._pass_on(int(message["number"]))
            elif kind == "size":
                for rank in self.ranks:
                    rank.resize(int(message["rows"]), int(message["columns"]))
            elif kind == "stop":
                self._signal_all(signal.SIGTERM)
                self._kill_after(float(message["grace"]))
            elif kind == "kill":
                self._kill_after(0.0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _prepare(self, message: dict[str, Any]) -> None:
        """Take the job, and send the launcher the facts of this host."""
        self._job = job = Specification.from_message(message)
        self._seat = seat_in(message, job, self.index, self.name)
        self.index = self._seat.index
        if not Path(job.directory).is_dir():
            raise FileNotFoundError(f"no folder {job.directory} on this host (launch.working_directory)")
        for each in network.addresses():
            self._send({"type": "address", "address": [each.interface, each.address, each.prefix]})
        self._send({"type": "ready", "hostname": socket.gethostname(), "time": time.time(), "code": code_version()})

    def _bind(self, address: str, port: int) -> None:
        """Take a port for rank 0, and keep it until rank 0 has it: in between somebody else might."""
        try:
            self.meeting = network.listen_on(address, port, one_host=self.seat.hosts == 1)
        except OSError as error:
            key = " (launch.master_port)" if port else ""
            return self._give_up(f"rank 0 cannot listen on {address} port {port}{key}: {error.strerror}")
        self._send({"type": "bound", "port": self.meeting.getsockname()[1]})

    def _start(self, message: dict[str, Any]) -> None:
        job, seat = self.job, self.seat
        host = seat.host
        base = {
            **os.environ,
            **job.environment,
            **devices.visibility(host.slots, {**os.environ, **job.environment}, job.device),
        }
        base |= devices.fabric_defaults(base) if job.device != "cpu" else {}
        base.setdefault("OMP_NUM_THREADS", str(devices.threads_per_rank(len(host.slots))))
        base.setdefault("PYTHONUNBUFFERED", "1")
        alone = ("lo" if seat.hosts == 1 else "", message["master_address"])  # no other host needs to reach us
        interface, address = message["places"].get(str(seat.index), alone)
        base |= {"JOB_SLOTS": str(len(host.slots)), "JOB_ADDRESS": address}
        if interface:
            base.setdefault("GLOO_SOCKET_IFNAME", interface)
        base |= {"JOB_CONFIG": self._write_configuration(), "JOB_CONFIG_SHA256": job.sha256}
        logs = Path(job.directory, job.logs) if job.logs else None
        master = (message["master_address"], int(message["master_port"]))
        first, size = seat.first_rank, len(host.slots)
        bind = "none" if job.wrapper or (job.bind == "numa" and job.device == "cpu") else job.bind
        places = (
            [(seat.index, 0, 1, seat.hosts)]
            if job.wrapper
            else [(first + local, local, size, seat.world_size) for local in range(size)]
        )
        for number, local, local_size, world in places:
            rank = RankProcess(number, self._log(logs, f"{'host' if job.wrapper else 'rank'}_{number:04d}.log"))
            environment = rank_environment(base, number, local, local_size, world, master)
            environment["JOB_PLACE"] = f"{host.name}/{host.slots[local]}"
            cores = devices.cores_of(local, size, environment, bind)
            bound = self.meeting.fileno() if number == 0 and self.meeting else None
            if bound is not None and not job.wrapper:
                environment[SOCKET] = str(bound)
            inherited: tuple[int, ...] = () if bound is None else (bound,)
            if not job.wrapper:
                rank.sight = Sight(number)
                environment |= rank.sight.variables
                inherited += rank.sight.descriptors
            rank.start(
                job.command, job.directory, environment, cores, job.terminal if number == 0 else (None, None), inherited
            )
            self.ranks.append(rank)
            for stream in rank.streams:
                self.selector.register(
                    stream.source, selectors.EVENT_READ, lambda r=rank, s=stream: self._from_rank(r, s)
                )
        self.seen = RankObserver(seat.index, self.ranks, job.watch)
        if self.meeting and not job.wrapper:  # torchrun binds it again for each of its restarts
            self.meeting.close()

    def _log(self, folder: Path | None, name: str) -> AppendFile | None:
        """A rank's log file, or None where it cannot be opened, which is reported and does not end the run."""
        if folder is None:
            return None
        try:
            return AppendFile(folder / name, complain=self._complain, gap=_gap)
        except OSError as error:
            self._complain(f"{folder / name} cannot be opened ({error.strerror}): the run continues without it")
            return None

    def _complain(self, text: str) -> None:
        """Report trouble with log files to the launcher, each kind once for all files."""
        now, words = time.monotonic(), text.partition(" ")[2]
        kind = words.split()[0] + words.split()[1]
        if now - self.complained.get(kind, -COMPLAINTS) >= COMPLAINTS:
            self.complained[kind] = now
            self._send({"type": "warning", "text": text})

    def _write_configuration(self) -> str:
        """Write the resolved configuration to a file that only this user can read, and return its path.

        The file is in memory and goes with this process, however that ends: on a disk, a killed agent would leave it.
        """
        self.configuration = os.memfd_create("config.yml")
        os.fchmod(self.configuration, 0o600)
        with open(self.configuration, "w", encoding="utf-8", closefd=False) as file:
            file.write(self.job.configuration)
        return f"/proc/{os.getpid()}/fd/{self.configuration}"

    def _launcher_lost(self) -> None:
        """The launcher is gone: let the ranks finish as after a stop signal, then end."""
        if self.connected:
            self.connected = False
            self.link.outgoing.clear()
            self.selector.unregister(self.link.source)
        if not self.ranks:
            self.finished = True
            return
        self._signal_all(signal.SIGTERM)
        self._kill_after(self.job.grace)

    def _give_up(self, reason: str) -> None:
        """Nothing can be started here: say why, and end."""
        self._send({"type": "problem", "text": reason})
        self._signal_all(signal.SIGKILL)
        self.finished = True

    # ---- the ranks' side

    def _from_rank(self, rank: RankProcess, stream: OutputStream) -> bool:
        """Read once, and return whether there may be more."""
        data = stream.read()
        if data is None:
            if stream.source in self.selector.get_map():
                self.selector.unregister(stream.source)
            return False
        if not data:
            return False
        lines = rank.keep(stream, data)
        if self.job.console == "all" and not (self.job.plain and rank.rank == 0):
            if lines:
                self._show(rank, stream, b"".join(line + b"\n" for line in lines))
        elif self._speaks(rank):
            self._show_or_hold(rank, stream, data)
        return True

    def _speaks(self, rank: RankProcess) -> bool:
        return self.job.console == "all" or rank.rank == 0 or self.job.wrapper

    def _show_or_hold(self, rank: RankProcess, stream: OutputStream, data: bytes) -> None:
        """Show what the speaking rank says, but keep a traceback back: if the rank ends, the launcher shows it once."""
        if not stream.held and stream.number == 2:
            found = TRACEBACK.search(data)
            if found:
                data, rest = data[: found.start()], data[found.start() :]
                stream.held_since = time.monotonic()
                stream.held.append(rest)
        elif stream.held:
            stream.held.append(data)
            return
        if data:
            self._show(rank, stream, data)

    def _show(self, rank: RankProcess, stream: OutputStream, data: bytes) -> None:
        if len(self.link.outgoing) > OUTPUT_LIMIT:
            self.dropped = True
            return
        if self.dropped:
            self.dropped = False
            data = b"[... the launcher did not read; what is missing here is in the log files ...]\n" + data
        message = {"type": "output", "host": self.index, "rank": rank.rank, "stream": stream.number}
        for line in encode_text(message, data.decode("utf-8", "surrogateescape")):
            self._queue(line)

    def _reap(self) -> None:
        """Take note of ranks that have ended, and of orphans of theirs."""
        ended = [(rank, status) for rank in self.ranks if rank.alive and (status := rank.poll()) is not None]
        # All have ended since the last look: one that was killed did not react to another's end.
        for rank, status in sorted(ended, key=lambda each: -each[1] not in KILLS):
            self._ended(rank, status)
        if time.monotonic() < self.orphans_at:
            return
        self.orphans_at = time.monotonic() + BEAT
        known = {rank.pid for rank in self.ranks}
        for pid in children():
            if pid not in known:
                with suppress(ChildProcessError):  # ended and waited for since we looked
                    os.waitpid(pid, os.WNOHANG)

    def _ended(self, rank: RankProcess, status: int) -> None:
        shown = self._speaks(rank)
        for stream in rank.streams:
            while self._from_rank(rank, stream):
                pass
            shown = shown and not stream.held
            if stream.held and status == 0:
                self._show(rank, stream, b"".join(stream.held))
            stream.held.clear()
            if stream.source in self.selector.get_map():
                self.selector.unregister(stream.source)
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # what it left in its session
        rank.finish(status)
        early = status == 0 and rank.sight is not None and rank.sight.early(self.job.watch)
        status = 1 if early else status
        for line in self.seen.farewell(rank) if self.seen and status != 0 else ():
            self._queue(line)
        if status != 0 and not self.told_tail:
            words = rank.last_words()
            self.told_tail = bool(words) and not COMPLAINT.search(words)  # after silence, or of a peer: one may say why
            message = {"type": "tail", "host": self.index, "rank": rank.rank, "shown": shown and not self.dropped}
            for line in encode_text(message, words):
                self._queue(line)
        self._send({
            "type": "exit",
            "rank": rank.rank,
            "status": status,
            "time": rank.failed_at,
            "now": time.time(),
            "late": self.killing and status == -signal.SIGKILL,
            "early": early,
            "step": rank.step,
        })

    def _pass_on(self, number: int) -> None:
        """Send a signal to all ranks at once, and only once, though it may come from the launcher and from Slurm."""
        now = time.monotonic()
        if now - self.recent_signals.get(number, -10.0) < 0.5:
            return
        self.recent_signals[number] = now
        self._send({"type": "signalled", "number": number})
        self._signal_all(number)
        if number in STOP_SIGNALS:
            self._kill_after(self.job.grace if self.job else 0.0)
            if not self.ranks:
                self.finished = True

    def _signal_all(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def _kill_after(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    def _sweep(self) -> None:
        """Kill and wait for every descendant that is left, adopted orphans included."""
        deadline = time.monotonic() + AFTER_LOSS
        while (left := children()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass  # it ended by itself

    # ---- what is sent

    def _send(self, message: dict[str, Any]) -> None:
        message = {**message, "host": self.index}
        text = message.pop("text", None)
        for line in encode_text(message, text) if text is not None else [encode(message)]:
            self._queue(line)

    def _queue(self, line: bytes) -> None:
        if self.connected:
            self.link.put(line)
            self._watch_target(bool(self.link.outgoing))

    def _flush(self) -> None:
        self.link.flush()
        self._watch_target(bool(self.link.outgoing))

    def _watch_target(self, writing: bool) -> None:
        """Wait for the launcher to take more, while there is more."""
        source, target = self.link.source, self.link.target
        if target == source:
            if self.connected:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
                self.selector.modify(source, events, self._from_launcher)
        elif writing and target not in self.selector.get_map():
            self.selector.register(target, selectors.EVENT_WRITE, self._flush)
        elif not writing and target in self.selector.get_map():
            self.selector.unregister(target)

    def _last_flush(self) -> None:
        deadline = time.monotonic() + AFTER_LOSS
        while self.link.outgoing and time.monotonic() < deadline:
            self._flush()
            time.sleep(0.01)


def _gap(lost: int) -> bytes:
    return f"[... {lost} bytes are missing here: the disk was full ...]\n".encode()


def main(arguments: list[str]) -> int:
    """`deepy.py --agent [--index N or VARIABLE] [--host NAME or VARIABLE] [--credentials PATH or VARIABLE]`."""
    options = dict(zip(arguments[::2], arguments[1::2]))
    index, host = options.get("--index"), options.get("--host")
    number = None if index is None else int(os.environ.get(index, index))
    name = None if host is None else os.environ.get(host, host)
    if "--credentials" in options:
        from ..wire.listener import connect

        link = connect(options["--credentials"], number or 0)
        return Agent(link.fileno(), link.fileno(), number).run()
    target = os.dup(1)
    os.dup2(2, 1)  # whatever prints by accident must not mix with our messages
    return Agent(0, target, number, name).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
