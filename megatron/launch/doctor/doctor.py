"""The doctor: checks every host before a long run, and reports faults in a table."""

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.config.problems import counted
from megatron.config.sections.layout import LaunchSection
from megatron.installation import code_version, root
from megatron.worker import network

from ..job.hosts import RunnerChoice
from ..launcher.launcher import Launcher, Result
from ..report import forwarding
from ..report.console import Failure, RankConsole, hint_for
from ..watch.watch import InquirySocket, instead_of_ranks
from ..wire.protocol import Command
from ..wire.specification import Host, Specification
from .probe import MEASURES, PAIRS, Measure, best_pairs, outliers

GIB = 1 << 30
LONGEST = 300.0  # seconds that an examination may take once all hosts have answered: a disk may never do
OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class HostFinding:
    """One line of the table: severity, check, finding, hosts."""

    grade: str
    check: str
    value: str
    hosts: tuple[str, ...] = ()
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self)


class Collector(RankConsole):
    """Takes the place of the console: keeps what each rank says."""

    def __init__(self) -> None:
        super().__init__(plain=False)
        self.text: dict[tuple[int, int], str] = {}

    def show(self, host: str, rank: int, stream: int, text: str) -> None:
        self.text[rank, stream] = self.text.get((rank, stream), "") + text

    def settle(self, patience: float = 0.0) -> None:
        """Nothing waits here."""

    def answers(self) -> dict[int, dict[str, Any]]:
        """The JSON line of each rank that gave one."""
        found = {}
        for (rank, stream), text in self.text.items():
            lines = [line for line in text.splitlines() if line.startswith("{")]
            if stream == 1 and lines:
                found[rank] = json.loads(lines[-1])
        return found


class Doctor:
    """Examines the hosts of a choice.

    Args:
        choice: the runner and the hosts.
        start: builds the runner's commands for a job.
        python: interpreter on the hosts.
        timeout: seconds until every host must have answered.
        compare: whether to measure the hosts, and to name the slow ones.
        run: whose folder and environment the probes have. None takes the current folder and the forwarded variables.

    Attributes:
        signals: that came meanwhile.
    """

    def __init__(
        self,
        choice: RunnerChoice,
        start: Callable[[Specification], list[Command]],
        python: str | None = None,
        timeout: float = 30.0,
        compare: bool = False,
        run: Specification | None = None,
    ) -> None:
        self.choice, self.commands, self.timeout, self.compare = choice, start, timeout, compare
        self.folder = Path(run.directory, run.logs).parent if run and run.logs else None  # where a run's user asks
        self.environment = run.environment if run else forwarding.forwarded(os.environ, [])
        self.directory = run.directory if run else os.getcwd()
        self.signals: tuple[int, ...] = ()
        self.python = python or sys.executable
        self.names = [host.name for host in choice.hosts]

    def examine(self) -> list[HostFinding]:
        """All findings, in the order of the table."""
        folder, closed = Path(f".doctor-{secrets.token_hex(4)}").resolve(), None
        try:
            try:
                folder.mkdir(mode=0o700)
                (folder / "token").write_text("seen")
            except OSError as error:
                closed = error.strerror
            launcher, result, collector = self._run(("facts", str(folder)))
            back = {int(path.suffix[1:]) for path in folder.glob("seen.*")}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        findings = [
            HostFinding(
                FAIL,
                "reachable",
                each.reason or each.text.strip().rpartition("\n")[2],
                (each.host,),
                hint_for(f"{each.reason}\n{each.text}", each.status) or "",
            )
            for each in result.failures
        ]
        answers = collector.answers()
        if len(answers) < len(self.names):
            return findings or [HostFinding(FAIL, "reachable", "no answer", tuple(self.names))]
        findings.append(HostFinding(OK, "reachable", f"by {self.choice.transport}", tuple(self.names)))
        for index, answer in answers.items():
            answer["shared"] = answer["shared"] and index in back
            answer["code"] = launcher.hosts[index].code
        findings += judge([answers[index] for index in range(len(self.names))], self.names)
        if closed:
            findings = [each for each in findings if each.check != "shared folder"]
            findings.append(
                HostFinding(
                    FAIL,
                    "shared folder",
                    f"the current folder cannot be written to: {closed}",
                    tuple(self.names),
                    "start the doctor where the run will start: its directory and checkpoints are made there",
                )
            )
        findings += judge_clocks([host.offset for host in launcher.hosts], self.names)
        findings += self._speeds()[1] if self.compare else []
        return findings + self._networks(launcher, min(answer["accelerators"] for answer in answers.values()))

    def _run(
        self, words: tuple[str, ...], slots: tuple[int, ...] = (), address: str | None = None
    ) -> tuple[Launcher, Result, Collector]:
        """Run the probe on every host: a rank for each slot, which sees the devices of these. Without slots it is one
        rank, which sees all that the host has."""
        top = str(root())
        job = Specification(
            hosts=tuple(Host(name, slots or (0,)) for name in self.names),
            command=(self.python, "-u", "-m", "megatron.launch.doctor.probe", *words),
            directory=self.directory,
            environment={**self.environment, "PYTHONPATH": top, "OMP_NUM_THREADS": "1"},
            code=code_version(),
            console="all",
            grace=5.0,
            heartbeat=30.0,
            device="auto" if slots else "cpu",  # of a rank on the CPU agents hide no device
            bind="none",
        )
        settings = LaunchSection(
            master_address=address, start_timeout=self.timeout, check_code=False, heartbeat=job.heartbeat
        )
        launcher, collector = Launcher(job, self.commands(job), settings), Collector()
        launcher.console, launcher.quiet = collector, True
        if self.folder is not None:
            doing = f"comparing {counted(len(self.names), 'host')} (launch.compare: {words[0]})"
            launcher.window = InquirySocket(instead_of_ranks(doing), launcher.selector, self.folder)
        launcher.deadline = time.monotonic() + self.timeout + LONGEST
        result = launcher.run()
        self.signals = self.signals or result.signals
        return launcher, result, collector

    def compared(self) -> list[HostFinding]:
        """Hosts that are slower than the others, and nothing else: a few seconds for each thing that is measured. After
        one that fails there are no more."""
        launcher, findings, accelerators = self._speeds()
        for way in self._ways(launcher, accelerators) if launcher.started else ():
            failed = any(each.grade == FAIL for each in findings)
            findings += [] if self.signals or failed else self._pairs(*way)
        return [each for each in findings if each.grade != OK]

    def _ways(self, launcher: Launcher, accelerators: int) -> list[tuple[str, str, str]]:
        """(backend, name, address of the first host) of every network that all hosts have."""
        if len(self.names) == 1:
            networks = [("loopback", "127.0.0.1")]
        else:
            networks = [
                (f"{chosen[0].interface} {chosen[0].network}", chosen[0].address)
                for chosen in network.shared_networks([host.addresses for host in launcher.hosts])
            ]
        backends = ["gloo", "nccl"] if accelerators else ["gloo"]
        return [(backend, name, address) for name, address in networks for backend in backends]

    def _networks(self, launcher: Launcher, accelerators: int) -> list[HostFinding]:
        """A small all-reduce over every network that all hosts have."""
        single, ways = len(self.names) == 1, self._ways(launcher, accelerators)
        if not ways:
            return [
                HostFinding(
                    FAIL,
                    "network",
                    "no network that all hosts share",
                    tuple(self.names),
                    "set launch.master_address and launch.interface, if routers join the hosts' networks",
                )
            ]
        slots = (0, 1) if single and accelerators != 1 else (0,)
        findings = [self._reduce(*way, slots) for way in ways]
        return findings + [each for way in ways for each in (self._pairs(*way) if self.compare and not single else ())]

    def _speeds(self) -> tuple[Launcher, list[HostFinding], int]:
        """The speed of each host by itself, all at once, and the least number of devices."""
        launcher, result, collector = self._run(("speeds",))
        answers = collector.answers()
        if result.first or len(answers) < len(self.names):
            return launcher, [_failed("speeds", "", result.first)] if result.first else [], 0
        findings = [
            each
            for measure in MEASURES
            for each in judge_rates(measure, [answers[rank][measure.name] for rank in sorted(answers)], self.names)
        ]
        return launcher, findings, min(answer["devices"] for answer in answers.values())

    def _pairs(self, backend: str, name: str, address: str) -> list[HostFinding]:
        _, result, collector = self._run(("pairs", backend), (0,), address)
        if result.first:
            return [_failed(f"pairs {backend}", f"{name}: ", result.first)]
        met = {rank: {int(to): rate for to, rate in own["rates"].items()} for rank, own in collector.answers().items()}
        best = best_pairs(met)
        return judge_rates(PAIRS, [best[rank] for rank in sorted(best)], self.names, f"{name}, {backend}: ")

    def _reduce(self, backend: str, name: str, address: str, slots: tuple[int, ...]) -> HostFinding:
        _, result, collector = self._run(("reduce", backend), slots, address)
        check = f"all-reduce {backend}"
        if result.first:
            return _failed(check, f"{name}: ", result.first)
        answers = collector.answers()
        if not all(answer["right"] for answer in answers.values()):
            return HostFinding(
                FAIL, check, f"{name}: a wrong sum", tuple(self.names), "do not train: memory or network damage data"
            )
        slowest = max(answer["seconds"] for answer in answers.values())
        size = next(iter(answers.values()))["bytes"]
        return HostFinding(
            OK, check, f"{name}: {size / slowest / 1e9:.2f} GB/s, {len(answers)} ranks", tuple(self.names)
        )


def _failed(check: str, where: str, failure: Failure) -> HostFinding:
    text = failure.text.strip()
    value = f"{where}{(text or failure.reason).rpartition(chr(10))[2]}"
    return HostFinding(FAIL, check, value, (failure.host,), hint_for(text + failure.reason, failure.status) or "")


def judge_rates(measure: Measure, rates: list[float], names: list[str], where: str = "") -> list[HostFinding]:
    """A line for each host that is slower than the others, else one for all."""

    def shown(rate: float) -> str:
        return f"{rate / measure.size:.3g} {measure.unit}"

    slow = []
    for host, usual in outliers(rates, measure.factor):
        value = f"{where}{shown(rates[host])}, the others {shown(usual)}"
        slow.append(HostFinding(WARN, measure.name, value, (names[host],), measure.advice))
    span = f"{where}{shown(min(rates))} to {shown(max(rates))}"
    return slow or [HostFinding(OK, measure.name, span, tuple(names))]


def judge(answers: list[dict[str, Any]], names: list[str]) -> list[HostFinding]:
    """Findings from the hosts' facts. Versions must be equal, and limits large enough."""
    findings = []
    for check in ("python", "torch", "deepspeed", "transformers", "pydantic", "tokenizers", "driver", "code"):
        findings += _equal(check, [answer[check] for answer in answers], names)
    findings += _accelerators(answers, names)
    for check, low, unit, advice in (
        ("open files", 4096, 1, "ulimit -n 65536 (limits.conf, or LimitNOFILE of the service)"),
        ("shm", GIB, GIB, "docker run --shm-size=8g, or mount a larger tmpfs on /dev/shm"),
        ("shm free", GIB // 4, GIB, "remove what is left in /dev/shm"),
        ("disk free", 10 * GIB, GIB, "checkpoints need room: choose another run.dir"),
        ("memory", 4 * GIB, GIB, ""),
    ):
        findings += _enough(check, [answer[check] for answer in answers], low, unit, names, advice)
    if any(answer["accelerators"] for answer in answers):
        findings += _enough(
            "locked memory",
            [_limit(answer["locked memory"]) for answer in answers],
            64 << 20,
            GIB,
            names,
            "ulimit -l unlimited: RDMA needs it",
        )
    apart = tuple(name for name, answer in zip(names, answers) if not answer["shared"])
    findings.append(
        HostFinding(
            WARN,
            "shared folder",
            "the current folder is not the same disk",
            apart,
            "checkpoints and data must be on a disk that all hosts see, and pdsh needs it too",
        )
        if apart
        else HostFinding(OK, "shared folder", "the same everywhere", tuple(names))
    )
    return findings


def _accelerators(answers: list[dict[str, Any]], names: list[str]) -> list[HostFinding]:
    """Equal counts. Hosts without devices are named, and are wrong where they have a driver."""
    counts = [answer["accelerators"] for answer in answers]
    blind = tuple(name for name, each in zip(names, answers) if not each["accelerators"] and each["driver"] != "none")
    if blind:
        advice = (
            "nvidia-smi or rocm-smi. Containers need --gpus all (NVIDIA) or --device /dev/kfd --device /dev/dri (AMD)"
        )
        return [HostFinding(WARN, "accelerators", "none is seen, though there is a driver", blind, advice)]
    if not any(counts):
        return [HostFinding(OK, "accelerators", "none: a run here uses the CPU", tuple(names))]
    return _equal("accelerators", counts, names, WARN)


def _limit(value: int) -> float:
    return float("inf") if value < 0 else value


def _equal(check: str, values: list[Any], names: list[str], grade: str = FAIL) -> list[HostFinding]:
    """One line if all are equal, one per value if not. Missing facts are faults."""
    groups: dict[Any, list[str]] = {}
    for value, name in zip(values, names):
        groups.setdefault(value, []).append(name)
    findings = []
    for value, hosts in groups.items():
        bad = FAIL if value == "missing" else grade if len(groups) > 1 else OK
        shown = str(value)[:16] if check == "code" else str(value)
        advice = (
            ""
            if bad == OK
            else "pip install -r requirements/base.txt"
            if value == "missing"
            else "make it the same on all hosts"
        )
        findings.append(HostFinding(bad, check, shown, tuple(hosts), advice))
    return findings


def _enough(check: str, values: list[float], low: float, unit: int, names: list[str], advice: str) -> list[HostFinding]:
    few = [(value, name) for value, name in zip(values, names) if value < low]

    def shown(value: float) -> str:
        return "unlimited" if value == float("inf") else f"{value / unit:.1f} GiB" if unit > 1 else f"{value:.0f}"

    if few:
        return [
            HostFinding(WARN, check, f"{shown(value)}, less than {shown(low)}", (name,), advice) for value, name in few
        ]
    return [HostFinding(OK, check, f"{shown(min(values))} or more", tuple(names))]


def judge_clocks(offsets: list[float], names: list[str]) -> list[HostFinding]:
    """Offsets are the launcher's clock minus the host's, in seconds, the way of a message included."""
    wrong = [(offset, name) for offset, name in zip(offsets, names) if abs(offset) > 2.0]
    if wrong:
        return [
            HostFinding(
                WARN, "clock", f"{-offset:+.1f} s", (name,), "start an NTP service: logs of hosts do not fit together"
            )
            for offset, name in wrong
        ]
    return [HostFinding(OK, "clock", f"within {max(max(map(abs, offsets)), 0.01):.2f} s", tuple(names))]


def table(findings: Iterable[HostFinding], total: int) -> str:
    """The findings for people."""
    lines = []
    for each in findings:
        hosts = (
            f"all {total} hosts"
            if len(each.hosts) == total > 1
            else ", ".join(each.hosts[:6]) + (" ..." if len(each.hosts) > 6 else "")
        )
        lines.append(f"{each.grade:>4}  {each.check:<16} {each.value:<48} {hosts}".rstrip())
        if each.advice and each.grade != OK:
            lines.append(f"{'':22} -> {each.advice}")
    return "\n".join(lines)
