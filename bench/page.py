"""Measure every row of the tables of docs/benchmarks.md with its peers, and write the tables.

    OMP_NUM_THREADS=1 python -m bench page                       what is not measured yet, then the tables
    OMP_NUM_THREADS=1 python -m bench page --only start data     some tables
    OMP_NUM_THREADS=1 python -m bench page --match 160m          rows with this in their names
    python -m bench page --list | --write-only | --fresh

`make bench` runs it in an environment that has the peers (requirements/bench.txt). Each row is kept in build/bench as
soon as it is found, by processor and clock, so that an interrupted run continues. `--fresh` measures again.
A row that fails is named, with the last line of its error, and the others follow: the exit status is then 1. A table
stays as it is where this processor has none of its rows: each table names its processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.processor import processor
from bench.runner import ROOT, markdown, share
from bench.step.train_step import COMPILED

PAGE, KEPT = ROOT / "docs" / "benchmarks.md", ROOT / "build" / "bench"
PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "litgpt",
    "megatron-core",
    "fla-core",
    "tokenizers",
    "gigatoken",
    "lm_eval",
)
TABLES = {
    "training": "Training steps",
    "bound": "Bounds of training steps",
    "threads": "Training steps with two threads",
    "ranks": "Two data parallel ranks",
    "start": "From the command to the first step",
    "data": "Order of samples, and the loader only",
    "tokenising": "Tokenising",
    "checkpoints": "Saving and resuming",
    "evaluation": "Evaluation",
    "compile": "torch.compile",
}


@dataclass(frozen=True)
class Row:
    """A measurement: a tool of this folder with its arguments, which prints JSON.

    Attributes:
        clocks: whether the tool takes `--clock`. If not, it has one of its own.
        threads: of each process, where the environment does not give them. Such a row is always measured by the clock,
            because processor time counts what all threads do, waiting included.
    """

    table: str
    tool: str
    arguments: tuple[str, ...]
    clocks: bool = True
    threads: int | None = None

    @property
    def name(self) -> str:
        threads = () if self.threads is None else (f"OMP_NUM_THREADS={self.threads}",)
        return " ".join((*threads, self.tool, *self.arguments))

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | ({} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)})

    def command(self, clock: str) -> list[str]:
        more = ["--clock", clock if self.threads is None else "wall"] if self.clocks else []
        return [sys.executable, "-m", "bench", self.tool, *self.arguments, *more, "--json"]


def _step(
    shape: str,
    samples: int,
    sequence: int = 512,
    rounds: int = 5,
    among: Sequence[str] = (),
    threads: int | None = None,
    table: str = "training",
) -> list[Row]:
    """In both types. All contenders are in memory at once, so large shapes meet some of them."""
    given = ["--shapes", shape, "--micro-batch", str(samples), "--sequence", str(sequence), "--steps", "1"]
    given += ["--rounds", str(rounds), *(["--contenders", "ours", *among] if among else [])]
    table = table if threads is None else "threads"
    both = [(*given, "--precision", precision) for precision in ("bf16", "fp32")]
    return [Row(table, "train_step", each, threads=threads) for each in both]


ROWS = (  # the second row of a shape has contenders that would not fit into 24 GB together with the first's
    *_step("pythia-14m", 4),
    *_step("llama-14m", 4),
    *_step("pythia-70m", 2, rounds=3, among=("eager", "compiled", "autocast", "litgpt")),
    *_step("pythia-70m", 2, rounds=3, among=("autocast-compiled", "litgpt-compiled")),
    *_step("llama-70m", 2, rounds=3, among=("eager", "compiled", "litgpt")),
    *_step("llama-70m", 2, rounds=3, among=("autocast", "autocast-compiled", "litgpt-compiled")),
    *_step("pythia-160m", 2, rounds=3, among=("eager", "litgpt")),
    *_step("pythia-160m", 2, rounds=3, among=("compiled", "autocast-compiled")),
    *_step("pythia-160m", 2, rounds=3, among=("autocast", "litgpt-compiled")),
    *_step("pythia-14m", 1, 2048, among=("eager", "compiled", "litgpt")),
    *_step("pythia-14m", 1, 2048, among=("autocast", "autocast-compiled", "litgpt-compiled")),
    *_step("llama-14m", 1, 2048, among=("eager", "compiled", "litgpt")),
    *_step("llama-14m", 1, 2048, among=("autocast", "autocast-compiled", "litgpt-compiled")),
    *_step("pythia-70m", 1, 2048, rounds=3, among=("eager", "litgpt")),
    *_step("llama-70m", 1, 2048, rounds=3, among=("eager", "litgpt")),
    *_step("pythia-160m", 1, 2048, rounds=3, among=("eager", "litgpt")),
    *_step("mamba2-14m", 2, among=("eager",)),
    *_step("mamba2-14m", 1, 2048, among=("eager",)),
    *_step("rwkv7-14m", 2, among=("fla",)),
    *_step("rwkv7-14m", 1, 2048, among=("fla",)),
    *(
        Row("training", "moe", ("--shapes", "small", "--precision", precision, "--steps", "1", *more))
        for more in ((), ("--sequence", "2048", "--micro-batch", "1"))
        for precision in ("bf16", "fp32")
    ),
    *(
        replace(bf16, table="bound", arguments=(*bf16.arguments, "--bound"))
        for shape in ("pythia-70m", "llama-70m", "pythia-160m")
        for bf16, _ in (_step(shape, 2, among=("litgpt", "litgpt-compiled")),)
    ),
    *_step("pythia-14m", 4, among=("eager", "compiled", "autocast", "litgpt"), threads=2),
    *_step("pythia-70m", 2, rounds=3, among=("eager", "autocast", "litgpt"), threads=2),
    *_step("pythia-160m", 2, rounds=3, among=("eager", "litgpt"), threads=2),
    *_step("llama-14m", 4, among=("eager", "litgpt"), threads=2),
    *_step("llama-70m", 2, rounds=3, among=("eager", "litgpt"), threads=2),
    *_step("mamba2-14m", 2, among=("eager",), threads=2),
    *_step("rwkv7-14m", 2, among=("fla",), threads=2),
    *(
        Row("threads", "moe", ("--shapes", "small", "--precision", precision, "--steps", "1"), threads=2)
        for precision in ("bf16", "fp32")
    ),
    *(
        Row("ranks", "replicas", ("--shapes", shape, "--precision", precision, "--micro-batch", samples), clocks=False)
        for shape, samples in (
            ("pythia-14m", "4"),
            ("pythia-70m", "2"),
            ("llama-14m", "4"),
            ("llama-70m", "2"),
            ("mamba2-14m", "2"),
        )
        for precision in ("bf16", "fp32")
    ),
    *(Row("start", "start", ("--ranks", ranks)) for ranks in ("1", "2", "8")),
    Row("data", "reading", ("--documents", "200000", "--tokens", "100e6"), clocks=False),
    Row("data", "reading", ("--documents", "5e6", "--tokens", "5e9", "--batches", "0", "--rounds", "3"), clocks=False),
    Row("tokenising", "tokenize", ("--megabytes", "20")),
    Row("checkpoints", "saving", ("--shape", "pythia-14m")),
    Row("checkpoints", "saving", ("--shape", "pythia-160m", "--rounds", "3")),
    Row("evaluation", "evaluating", ("--shape", "pythia-14m")),
    *(
        each
        for shape, samples in (
            ("pythia-14m", 4),
            ("llama-14m", 4),
            ("pythia-70m", 2),
            ("llama-70m", 2),
            ("mamba2-14m", 2),
            ("rwkv7-14m", 2),
        )
        for each in _step(shape, samples, among=tuple(COMPILED), table="compile")
    ),
)


class Kept:
    """Folder of measurements on this processor with this clock, a file for each row."""

    def __init__(self, clock: str, folder: Path = KEPT):
        machine = f"{processor()}; {clock}; {os.environ.get('OMP_NUM_THREADS', 'all')} threads"
        self.folder = folder / re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")

    def path(self, row: Row) -> Path:
        return self.folder / row.table / f"{hashlib.sha256(row.name.encode()).hexdigest()[:16]}.json"

    def find(self, row: Row) -> dict[str, Any] | None:
        path = self.path(row)
        return json.loads(path.read_text()) if path.exists() else None

    def add(self, row: Row, lines: list[dict[str, Any]]) -> None:
        path = self.path(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps({"row": row.name, "versions": versions(), "lines": lines}, indent=1))
        draft.replace(path)


def versions() -> dict[str, str]:
    """Of what takes part, where it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measured(row: Row, clock: str) -> list[dict[str, Any]]:
    """Raises RuntimeError with the last line of what the tool said, where it fails."""
    command, environment = row.command(clock), row.environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "it said nothing").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def write(page: str, clock: str, kept: Kept) -> str:
    """The page with what has been measured between its marks.

    Raises:
        ValueError: the page has no marks of a table.
    """
    for table in TABLES:
        begin, end = f"<!-- measured: {table} -->\n", "<!-- end -->"
        if begin not in page:
            raise ValueError(f"{PAGE}: there is no line {begin.strip()}")
        before, rest = page.split(begin, 1)
        after = rest[rest.index(end) :]
        page = f"{before}{begin}{text(table, clock, kept) or rest[: rest.index(end)]}{after}"
    return page


def text(table: str, clock: str, kept: Kept) -> str:
    """A table without its commands, or no text where nothing was measured."""
    rows = [row for row in ROWS if row.table == table]
    found = [each for row in rows if (each := kept.find(row)) is not None]
    if not found:
        return ""
    used = ", ".join(f"{name} {each}" for name, each in found[-1]["versions"].items())
    by_clock = clock == "wall" or rows[0].threads is not None
    time = "the clock" if by_clock else "processor time, where a row's tool can"
    threads = rows[0].threads or os.environ.get("OMP_NUM_THREADS", "all")
    note = f"{processor()}, OMP_NUM_THREADS={threads}, by {time}. Packages: {used}."
    return f"{markdown([line for each in found for line in each['lines']])}\n\n{textwrap.fill(note, 120)}\n"


def wanted(only: Sequence[str], part: str) -> list[Row]:
    return [row for row in ROWS if (not only or row.table in only) and part in row.name]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=TABLES, default=[], help="these tables")
    parser.add_argument("--match", default="", metavar="TEXT", help="rows with this in the name that --list shows")
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
    parser.add_argument("--list", action="store_true", help="print the rows, and which are kept")
    parser.add_argument("--write-only", action="store_true", help="write the tables from what is kept")
    share(parser, "--clock", clock="cpu")


def measure(given: argparse.Namespace) -> int:
    """Measure rows that are not kept, and write the page."""
    kept, failed = Kept(given.clock), False
    chosen = wanted(given.only, given.match)
    if given.list:
        print("\n".join(f"{'kept' if kept.find(row) else '    '}  {row.table:12} {row.name}" for row in chosen))
        return 0
    for number, row in enumerate([] if given.write_only else chosen, 1):
        if kept.find(row) is not None and not given.fresh:
            continue
        print(f"{number}/{len(chosen)}: {row.name}", flush=True)
        try:
            lines = measured(row, given.clock)
            kept.add(row, lines)
            print(markdown(lines), flush=True)
        except (RuntimeError, ValueError) as error:
            failed = True
            print(f"error: {row.name}: {error}", file=sys.stderr, flush=True)
        PAGE.write_text(write(PAGE.read_text(), given.clock, kept))
    PAGE.write_text(write(PAGE.read_text(), given.clock, kept))
    return 1 if failed else 0
