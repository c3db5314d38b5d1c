"""The console: a line per logged step and, on a terminal, a progress bar below lines that fit its width."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any, TextIO

from megatron.config.problems import counted
from megatron.pipes import visible

ERASE = "\r\x1b[K"  # starts every status line, and removes it


def columns_of(file: TextIO) -> int | None:
    """Columns of the terminal behind a file, or the value of COLUMNS. None: any width."""
    if file.isatty():
        try:
            return os.get_terminal_size(file.fileno()).columns or 80
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdigit() and int(given) else None


def wrapped(text: str, columns: int | None, indent: str = "    ") -> str:
    """Lines longer than `columns` broken at spaces. Paths and words stay whole."""
    if columns is None:
        return text
    broken = [
        textwrap.wrap(line, max(columns, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        if len(line) > columns
        else [line]
        for line in text.splitlines()
    ]
    return "\n".join(piece for pieces in broken for piece in pieces)


def say(text: str) -> None:
    """Print on standard output. On a terminal no word is broken at its edge."""
    print(wrapped(text, columns_of(sys.stdout)) if sys.stdout.isatty() else text)


class StatusLine:
    """The last drawn status line, which has to be removed before other output.

    Rank 0 draws it. The launcher, which writes to the same terminal, recognises it and keeps it below its own lines.

    Attributes:
        text: without control codes, or empty.
    """

    def __init__(self) -> None:
        self.text = ""

    def removed(self, columns: int | None) -> str:
        """The codes that remove the line from the terminal, also where a narrower window has wrapped it."""
        rows = (len(self.text) - 1) // columns if self.text and columns else 0
        return ERASE + (f"\x1b[{rows}A\x1b[J" if rows else "") if self.text else ""

    def drawn(self) -> str:
        return ERASE + self.text if self.text else ""

    def above(self, text: str, columns: int | None) -> str:
        """Codes and text that put text above the status line. Text without an end of line takes its place."""
        removed = self.removed(columns)
        self.text = self.text if text.endswith("\n") else ""
        return removed + text + self.drawn()


def short_number(number: float) -> str:
    """Three significant digits and a unit prefix: 998, 1.07k, 12.0M. A whole number below 1000 as it is."""
    digits, prefix = _digits(number)
    return digits + prefix


def _digits(number: float) -> tuple[str, str]:
    for prefix in ("", "k", "M", "G", "T", "P"):
        digits = f"{number:.0f}" if not prefix and float(number).is_integer() else f"{number:#.3g}".removesuffix(".")
        if abs(float(digits)) < 1000:  # after rounding: 999.7 is 1.00k
            return digits, prefix
        number /= 1000
    return f"{number * 1000:.3g}", "P"


def duration(seconds: float) -> str:
    """1:02:03 or 2d 03:04:05."""
    days, rest = divmod(int(round(seconds)), 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}" if days else f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


BAR = 16  # columns of the progress bar
# Dropped from a line that is too narrow for all, in this order.
LEAST_FIRST = ("peak", "share", "tflops", "mfu", "memory_bytes", "eta_seconds", "grad_norm", "tokens_per_second", "lr")
IN_THE_BAR = ("share", "eta_seconds")


def training_line(record: Mapping[str, Any], total: int, width: int | None = None, *, bar: bool = False) -> str:
    """One training record as text. Values that are missing, or for which `width` is too small, are omitted.

    Args:
        bar: a progress bar shows the share and the time to the end.
    """
    shown = {
        "step": lambda v: f"step {v:>{len(str(total))}}",
        "share": lambda v: f"{v:6.1%}",
        "loss": lambda v: f"loss {v:.4f}",
        "lr": lambda v: f"lr {v:.3e}",
        "grad_norm": lambda v: f"grad {v:.3f}",
        "tokens_per_second": lambda v: f"{short_number(v)} tok/s",
        "tflops": lambda v: "{} {}FLOP/s".format(*_digits(v * 1e12)),
        "mfu": lambda v: f"MFU {v:.1%}",
        "peak": lambda v: f"of {v:g} TFLOP/s",
        "memory_bytes": lambda v: f"mem {v / 2**30:.2f} GiB",
        "eta_seconds": lambda v: f"ETA {duration(v)}",
        "skipped": lambda v: "skipped: overflow",
        "unlabelled": lambda v: "no label counts: no update",
    }
    values = {**record, "share": (record["step"] + 1) / max(total, 1)}
    values["peak"] = record.get("peak_tflops") if record.get("mfu") is not None else None
    there = [name for name in shown if values.get(name) is not None and values[name] is not False]
    parts = {name: shown[name](values[name]) for name in there if not (bar and name in IN_THE_BAR)}
    for name in LEAST_FIRST:
        if width is None or len(_joined(parts)) <= width:
            break
        parts.pop(name, None)
    return _joined(parts)


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(parts.values()).replace("  of ", " of ")


def progress_line(done: int, total: int, eta: float | None, width: int) -> str:
    """The bar of a run that has completed `done` of `total` steps, shorter than `width` columns."""
    filled = BAR * done // max(total, 1)
    bar = "#" * filled + "-" * (BAR - filled)
    line = f"[{bar}] {done / max(total, 1):6.1%}  {done:,} of {total:,} {'step' if total == 1 else 'steps'}"
    whole = line + ("" if eta is None else f"  ETA {duration(eta)}")
    return next((each for each in (whole, line) if len(each) < width), line[: max(width - 1, 0)])


def validation_line(record: Mapping[str, Any]) -> str:
    sets = "  ".join(
        f"{'' if name == 'validation' else name + ': '}loss {values['loss']:.4f} perplexity {values['perplexity']:.2f}"
        + (f" bits/byte {values['bits_per_byte']:.4f}" if "bits_per_byte" in values else "")
        for name, values in record["validation"].items()
    )
    return f"validation after {counted(record['step'], 'step')}  {sets}"


def task_lines(record: Mapping[str, Any]) -> list[str]:
    """A line for each benchmark task, without standard errors."""
    return [
        f"{task} after {counted(record['step'], 'step')}  "
        + "  ".join(f"{name} {value:.4f}" for name, value in values.items() if "_stderr" not in name)
        for task, values in record["tasks"].items()
    ]


class MetricsConsole:
    """The console sink: a line per record, and on a terminal a bar below the lines.

    Args:
        mode: auto (a bar on a terminal), live (with the bar), plain (without) or quiet.
        total: steps of the whole run.
        file: standard output by default.
    """

    def __init__(self, mode: str, total: int, file: TextIO | None = None) -> None:
        self.file = sys.stdout if file is None else file
        self.total = total
        self.mode = ("live" if self.file.isatty() else "plain") if mode == "auto" else mode
        self._bar = StatusLine()
        self._eta: tuple[float, float] | None = None  # seconds to the end, and the time of that estimate
        self._drawn = 0.0

    def write(self, record: Mapping[str, Any]) -> None:
        if self.mode == "quiet":
            return
        if "validation" in record:
            self.log(validation_line(record))
        elif "tasks" in record:
            for line in task_lines(record):
                self.log(line)
        elif "lr" in record:  # else a record of a user's hook, of unknown form
            eta, live = record.get("eta_seconds"), self.mode == "live"
            self._eta = None if eta is None else (eta, time.monotonic())
            line = training_line(record, self.total, columns_of(self.file), bar=live)
            self._print(line + "\n", self._progress(record["step"] + 1) if live else "")

    def progress(self, done: int) -> None:
        """Show that a run has completed `done` steps: at most ten times a second."""
        if self.mode == "live" and time.monotonic() - self._drawn > 0.1:
            self._print("", self._progress(done))

    def log(self, text: str) -> None:
        """Print a message, above the bar if there is one."""
        if self.mode != "quiet":
            text = visible(text)  # it may contain a sample of a model, or a file name
            lines = wrapped(text, columns_of(self.file)) if self.mode == "live" else text
            self._print(lines + "\n", self._bar.text)

    def close(self) -> None:
        self._print("", "")

    def _progress(self, done: int) -> str:
        self._drawn = time.monotonic()
        eta = None if self._eta is None else max(self._eta[0] - (self._drawn - self._eta[1]), 0.0)
        return progress_line(done, self.total, eta, columns_of(self.file) or 80)

    def _print(self, lines: str, bar: str) -> None:
        """Replace the old bar by lines, and draw the new bar below them."""
        text = self._bar.removed(columns_of(self.file)) + lines
        self._bar.text = bar
        if text or bar:
            print(text + self._bar.drawn(), end="", file=self.file, flush=True)
