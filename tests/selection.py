"""Which tests run first, and which ones `make test-fast` runs: both follow from measured times in tests/durations.json.

A whole run (`--dist loadfile`) ends when its last file ends, so long files start first. A fast run has the first case
of every test function but those that take long; a new test belongs to it until somebody measures it. `make durations`
runs the whole suite and writes the file again; it needs no entry by hand, and a file that it does not know starts
early.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
UNKNOWN = 20.0  # seconds that a file without a measurement is taken to need
LONG = 1.0  # seconds from which a test function is listed, and is not part of a fast run


def read() -> dict[str, dict[str, float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {"files": {}, "long": {}}


def function_of(nodeid: str) -> str:
    """A test's name without its parameters: tests/a.py::test_b."""
    return nodeid.partition("[")[0]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--fast", action="store_true", help="only the first case of every test that takes under a second")
    group.addoption("--store-durations", action="store_true", help="write tests/durations.json from this run")


def configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch(), "stopwatch")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = read()
    items.sort(key=lambda item: -known["files"].get(item.nodeid.partition("::")[0], UNKNOWN))  # stable within a file
    if config.getoption("--fast"):
        seen: set[str] = set(known["long"])
        kept, left = [], []
        for item in items:
            name = function_of(item.nodeid)
            (left if name in seen else kept).append(item)
            seen.add(name)
        items[:] = kept
        config.hook.pytest_deselected(items=left)


class Stopwatch:
    """Adds up what each file and each function's longest case took, set-up included."""

    def __init__(self) -> None:
        self.cases: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        files: dict[str, float] = defaultdict(float)
        functions: dict[str, float] = defaultdict(float)
        for nodeid, seconds in self.cases.items():
            files[nodeid.partition("::")[0]] += seconds
            functions[function_of(nodeid)] = max(functions[function_of(nodeid)], seconds)
        written = {
            "files": {name: round(seconds, 1) for name, seconds in sorted(files.items())},
            "long": {name: round(seconds, 1) for name, seconds in sorted(functions.items()) if seconds >= LONG},
        }
        DURATIONS.write_text(json.dumps(written, indent=1) + "\n")
