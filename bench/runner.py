"""The runner of all measurements: one parser, one form of results, one treatment of errors.

A measurement is a module of a sub-folder with a docstring, which is its help, and two functions. `options(parser)` adds
its options. `measure(given)` returns a `Result`, or an exit status if it has printed its results itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
SHARED: dict[str, dict[str, Any]] = {  # options that several measurements have, with their usual values
    "sources": {"nargs": "+", "metavar": "a.yml", "help": "files and overrides of the run"},
    "--ranks": {"type": int, "default": 2},
    "--rounds": {"type": int, "default": 5, "help": "in which the sides take turns"},
    "--steps": {"type": int, "default": 2, "help": "steps of one side in one round"},
    "--sequence": {"type": int, "default": 512, "help": "tokens per sample"},
    "--micro-batch": {"type": int, "default": 1, "help": "samples per step"},
    "--vocabulary": {"type": int, "default": 50304},
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "--precision": {"choices": ("fp32", "bf16"), "default": "fp32"},
    "--clock": {
        "choices": tuple(CLOCKS),
        "default": "wall",
        "help": "cpu: processor time, for busy machines. Use it with OMP_NUM_THREADS=1",
    },
    "--machine": {"metavar": "FILE", "help": "further devices"},
}


class Mismatch(Exception):
    """Two sides do not compute the same thing."""


@dataclass(frozen=True)
class Result:
    """Results of a measurement.

    Attributes:
        document: for `--json`.
        text: for people.
        status: exit status, 0 if nothing is wrong with the results.
    """

    document: Any
    text: str
    status: int = 0


@dataclass(frozen=True)
class Comparison:
    """One row of a table: a number of ours, the same number of a peer, and their ratio.

    Attributes:
        what: what was measured, with its size.
        unit: of both numbers.
        ratio: how many times as fast we are (median over neighbouring rounds). Above 1 is better.
        least, most: smallest and largest ratio of a round.
        memory: our peak memory as a share of the peer's, if it was measured.
        peak: FLOP/s of matrix products in the same rounds, if they were measured.
        share, share_theirs: share of that peak which both numbers need, by the FLOPs of the models.
        bound: the largest ratio that any program could have, if it was measured.
    """

    what: str
    unit: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    least: float
    most: float
    memory: float | None = None
    peak: float | None = None
    share: float | None = None
    share_theirs: float | None = None
    bound: float | None = None


def compare(
    what: str, unit: str, seconds: Mapping[str, Sequence[float]], work: float | None = None, ours: str = "ours"
) -> list[dict[str, Any]]:
    """Compare ours with each of the others, from seconds of rounds in which they took turns.

    Args:
        work: amount of work in those seconds (tokens, bytes): numbers are then rates, in `unit`. None gives seconds.

    Returns:
        `Comparison`s as JSON has them.
    """

    def number(name: str) -> float:
        middle = statistics.median(seconds[name])
        return middle if work is None else work / middle

    made = []
    for name, theirs in seconds.items():
        if name != ours:
            ratios = [each / own for each, own in zip(theirs, seconds[ours], strict=True)]
            middle = statistics.median(ratios)
            made.append(Comparison(what, unit, name, number(ours), number(name), middle, min(ratios), max(ratios)))
    return [asdict(each) for each in made]


def add_shares(made: Sequence[dict[str, Any]], peak: float, flops: Mapping[str, float], ours: str = "ours") -> None:
    """Add the share of the peak that each side needs to comparisons of rates.

    Args:
        peak: FLOP/s.
        flops: of a unit of work, by the names of all sides.
    """
    for row in made:
        row["peak"] = peak
        row["share"] = flops[ours] * row["ours"] / peak
        row["share_theirs"] = flops[row["peer"]] * row["theirs"] / peak


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Results (seconds) of each way, round by round, one way after another in each round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def timed(action: Callable[..., Any], clock: str = "wall", *arguments: Any) -> float:
    """Seconds of an action by a clock of `CLOCKS`."""
    begin = CLOCKS[clock]()
    action(*arguments)
    return CLOCKS[clock]() - begin


def grid(cells: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown. The first row has the heads."""
    head, *others = ([str(cell) for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def markdown(made: Sequence[dict[str, Any]]) -> str:
    """The table of some comparisons, with columns for the peak and the bound if one of them has it."""
    peaks, bounds = (any(row.get(name) for row in made) for name in ("peak", "bound"))
    heads = ["measured", "ours", "peer", "its", "times as fast (range)", "memory, ours of its"]
    heads[5:5] = ["at most"] * bounds
    heads[1:1] = ["matmul peak"] * peaks
    text = [heads]
    for row in made:
        memory = "" if row["memory"] is None else f"{row['memory']:.2f}"
        span = f"{row['ratio']:.2f} ({row['least']:.2f} – {row['most']:.2f})"
        ours, theirs = (_number(row, *names) for names in (("ours", "share"), ("theirs", "share_theirs")))
        cells = [row["what"], ours, row["peer"], theirs, span, memory]
        if bounds:
            cells.insert(5, f"{row['bound']:.2f}" if row.get("bound") else "")
        if peaks:
            cells.insert(1, f"{row['peak'] / 1e9:.0f} GFLOP/s" if row.get("peak") else "")
        text.append(cells)
    return grid(text)


def _number(row: Mapping[str, Any], name: str, share: str) -> str:
    value = f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.3g}"
    return f"{value} {row['unit']}" + (f" ({row[share]:.0%})" if row.get(share) is not None else "")


def comparison(made: Sequence[dict[str, Any]]) -> Result:
    """The result of a measurement that compares."""
    return Result(list(made), markdown(made))


def in_folder(measure: Callable[[argparse.Namespace, Path], Result]) -> Callable[[argparse.Namespace], Result]:
    """Give a measurement a folder of its own, which is deleted afterwards."""

    @functools.wraps(measure)
    def call(given: argparse.Namespace) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            return measure(given, Path(folder))

    return call


def run_with_hook(
    given: argparse.Namespace, hook: str, options: Mapping[str, Any], own: Sequence[str], quiet: bool = False
) -> None:
    """Train the run of `given.sources` on `given.ranks` ranks with a hook of a measurement.

    Args:
        hook: `module:name` of the hook, with its options.
        own: further overrides.
        quiet: send the output of the run to standard error.

    Raises:
        SystemExit: the run failed. It ends with the status of the run.
    """
    from megatron.config import split_arguments
    from megatron.launch.command_line import main as launch

    files, overrides = split_arguments(given.sources)
    words = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
    more = ["logging.console=quiet", "logging.curve=false", f"hooks=[{{type: '{hook}', options: {{{words}}}}}]"]
    with_this_folder()
    with redirect_stdout(sys.stderr) if quiet else nullcontext():
        train = str(ROOT / "train.py")
        if status := launch(["--ranks", str(given.ranks), train, *files, *overrides, *own, *more]):
            raise SystemExit(status)


def with_this_folder() -> None:
    """Have the processes of a run find this package."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def measurements() -> dict[str, tuple[str, str]]:
    """Names of all measurements, each with its module and the first sentence of its help."""
    found = {}
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")], key=lambda path: path.stem):
        text = path.read_text(encoding="utf-8")
        about = re.match(r'"""(.+?)\.(?:"""|\s)', text, re.DOTALL)
        if "\ndef options(" in text and about is not None:
            module = ".".join(("bench", *path.relative_to(folder).with_suffix("").parts))
            found[path.stem.replace("_", "-")] = module, " ".join(about[1].split())
    return found


def share(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add options of `SHARED`, some with another default than usual."""
    for name in names:
        default = {"default": defaults[word]} if (word := name.lstrip("-").replace("-", "_")) in defaults else {}
        parser.add_argument(name, **{**SHARED[name], **default})


def parser_of(module: ModuleType, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a measurement."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=module.__doc__, formatter_class=form)
    module.options(parser)
    with suppress(argparse.ArgumentError):  # a few write a file
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(name: str, words: Sequence[str], prog: str | None = None) -> int:
    """Run a measurement with the words of a command line, and return the exit status."""
    from megatron.config.problems import UserError

    module = importlib.import_module(measurements()[name.replace("_", "-")][0])
    given = parser_of(module, prog).parse_intermixed_args([str(word) for word in words])
    given.words = [str(word) for word in words]  # for a measurement that other processes start again
    try:
        result = module.measure(given)
    except (Mismatch, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if isinstance(result, int):
        return result
    if text := json.dumps(result.document) if given.json is True else result.text:
        print(text)
    return result.status


def main(words: Sequence[str] | None = None) -> int:
    """Run the measurement that the first word names, or list all."""
    words, known = list(sys.argv[1:] if words is None else words), measurements()
    name = words[0].replace("_", "-") if words else ""
    if name in known:
        return run(name, words[1:], f"deepy bench {name}")
    print("usage: python -m bench NAME [options]\n")
    print("\n".join(f"  {each:16} {about}" for each, (_, about) in known.items()))
    return 0 if name in ("-h", "--help") else 2
