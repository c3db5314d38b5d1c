"""Which tests run first, and which ones `make test-fast` runs: both follow from measured times in tests/durations.json.

A whole run (`--dist loadfile`) ends when its last file ends, so long files start first. A fast run has the first case
of every test function, except long ones. A new test belongs to it until somebody measures it. `make durations`
runs the whole suite and writes the file again, `pytest --store-durations FILE ...` measures only some files. It needs
no entry by hand, and a file that it does not know starts early.

Times are CPU seconds, of the process that runs a test and of all processes below it. They are nearly the same on a
quiet machine and on a busy one. Seconds by the clock depend on other work. Seconds by the clock are only checked for
tests that wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
UNKNOWN = 20.0  # seconds that a file without a measurement is taken to need
LONG = 0.6  # CPU seconds from which a test function is listed, and is not part of a fast run
NO_TIME = "no time left (--until)"
WAITS = 1.0  # seconds by the clock from which it is, though it computes little


def read() -> dict[str, dict[str, float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {"files": {}, "long": {}}


def function_of(nodeid: str) -> str:
    """A test's name without its parameters: tests/a.py::test_b."""
    return nodeid.partition("[")[0]


def covering(*axes: Iterable[Any], every: int | None = None) -> list[Any]:
    """All combinations of axes that do not depend on each other, most of them slow. A plain run has one in `every`,
    among them each value of each axis.

    Args:
        every: at most the length of the shortest axis, which is the default.
    """
    known = [list(axis) for axis in axes]
    every = every or min(map(len, known))
    assert every <= min(map(len, known))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(known, places)), marks=[pytest.mark.slow] if sum(places) % every else []
        )
        for places in product(*(range(len(axis)) for axis in known))
    ]


def toured(cases: Iterable[Any], mark: str = "tour") -> list[Any]:
    """Cases of runs that differ in their layout or the like. A plain run has the first one that is not slow, and the
    others have the mark.

    Args:
        cases: values of one parameter, tuples of several, or `pytest.param`.
        mark: `tour` or `layouts`.
    """
    found: list[Any] = []
    first = True
    for each in cases:
        case = each
        if not isinstance(each, type(pytest.param())):
            case = pytest.param(*(each if type(each) is tuple else [each]))
        if not any(own.name == "slow" for own in case.marks):
            marks = [*case.marks, *([] if first else [getattr(pytest.mark, mark)])]
            case, first = pytest.param(*case.values, id=case.id, marks=marks), False
        found.append(case)
    return found


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--fast", action="store_true", help="only the first case of tests well under a second")
    group.addoption("--sample", type=int, default=1, metavar="N", help="only every Nth case of every test")
    group.addoption("--until", type=float, metavar="T", help="skip tests that would start later (seconds since 1970)")
    group.addoption(
        "--store-durations", action="store_true", help="measure the files of this run for tests/durations.json"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() >= until:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    late = sum(report.longrepr[2].endswith(NO_TIME) for report in terminalreporter.stats.get("skipped", []))
    if late:
        terminalreporter.write_line(f"{late} tests were not run, because the machine was too slow for them")


def configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations"):
        config.pluginmanager.register(Meter(), "meter")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Stopwatch(), "stopwatch")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = read()
    items.sort(key=lambda item: -known["files"].get(item.nodeid.partition("::")[0], UNKNOWN))  # stable within a file
    if (every := config.getoption("--sample")) > 1:
        before: Counter[str] = Counter()
        chosen, others = [], []
        for item in items:
            name = function_of(item.nodeid)
            (others if before[name] % every else chosen).append(item)
            before[name] += 1
        items[:] = chosen
        config.hook.pytest_deselected(items=others)
    if config.getoption("--fast"):
        seen: set[str] = set(known["long"])
        kept, left = [], []
        for item in items:
            name = function_of(item.nodeid)
            (left if name in seen else kept).append(item)
            seen.add(name)
        items[:] = kept
        config.hook.pytest_deselected(items=left)


def cpu_seconds(process: int) -> float:
    """CPU time of a process, of its descendants, and of processes that it has waited for. Of all but daemons, that
    is."""
    folder = Path("/proc", str(process))
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        tasks = list((folder / "task").iterdir())
    except OSError:  # it ended while we looked, or the system has no such files
        return sum(os.times()[:4]) if process == os.getpid() else 0.0
    below: list[str] = []
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that ended meanwhile has no children. Its process has
            below += (task / "children").read_text().split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(each)) for each in below)


class Meter:
    """In the process that runs the tests: gives each report the CPU time of its phase."""

    def __init__(self) -> None:
        self.before = 0.0
        self.process = os.getpid()  # a test may replace `os.getpid`

    def pytest_runtest_logstart(self) -> None:
        self.before = cpu_seconds(self.process)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        now = cpu_seconds(self.process)
        report.cpu, self.before = max(0.0, now - self.before), now  # what a dead host has used is lost
        report.shared = shared_fixtures(item)
        return report


def shared_fixtures(item: pytest.Item) -> list[str]:
    """Names of a test's fixtures that are made once for several tests, by this suite."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return sorted(name for name, each in known.items() if each[-1].scope != "function" and each[-1].baseid)


class Stopwatch:
    """Adds up what each file and each function's longest case took, set-up included.

    Shared values of tests are made for the first of them, but would be made for any other that is chosen without it.
    """

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.clock: dict[str, float] = defaultdict(float)
        self.made: dict[tuple[str, str], float] = defaultdict(float)  # by file and fixture, for the dearest test
        self.shared: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cpu[report.nodeid] += report.cpu
        self.clock[report.nodeid] += report.duration
        if report.when == "setup":
            self.shared[report.nodeid] = report.shared
            for name in report.shared:
                key = report.nodeid.partition("::")[0], name
                self.made[key] = max(self.made[key], report.cpu)

    def pytest_sessionfinish(self) -> None:
        files: dict[str, float] = defaultdict(float)
        functions: dict[str, float] = defaultdict(float)
        for nodeid, seconds in self.cpu.items():
            file = nodeid.partition("::")[0]
            files[file] += seconds
            seconds = max([seconds, *(self.made[file, name] for name in self.shared.get(nodeid, ()))])
            if self.clock[nodeid] >= WAITS:
                seconds = max(seconds, LONG)
            functions[function_of(nodeid)] = max(functions[function_of(nodeid)], seconds)
        long = {name: seconds for name, seconds in functions.items() if seconds >= LONG}
        DURATIONS.write_text(json.dumps(merged(read(), files, long), indent=1) + "\n")


def merged(known: dict[str, dict[str, float]], files: dict[str, float], long: dict[str, float]) -> dict:
    """Known times, with the times that a run of these files measured. Files that are gone are forgotten."""

    def kept(name: str) -> bool:
        file = name.partition("::")[0]
        return file not in files and (DURATIONS.parents[1] / file).exists()

    def together(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
        both = {name: seconds for name, seconds in before.items() if kept(name)} | now
        return {name: round(seconds, 1) for name, seconds in sorted(both.items())}

    return {"files": together(known["files"], files), "long": together(known["long"], long)}
