"""What the person who watches a run sees: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from megatron.config.words import counted

if TYPE_CHECKING:
    from rich.live import Live


def short_number(number: float) -> str:
    """Four digits at most and a unit prefix: 12.3k, 4.56M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """1:02:03 or 2d 03:04:05."""
    days, rest = divmod(int(round(seconds)), 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}" if days else f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


BAR = 12  # columns of the progress bar
# Left out of a line that is too narrow for all, in this order.
LEAST_FIRST = ("memory_bytes", "tflops", "peak", "mfu", "share", "tokens_per_second", "grad_norm", "eta_seconds", "lr")


def training_line(record: Mapping[str, Any], total: int, width: int | None = None) -> str:
    """One training record as text; a value that is not there is left out, and so is what `width` has no room for."""
    shown = {
        "step": lambda v: f"step {v:>{len(str(total))}}",
        "share": lambda v: f"{v:6.1%}",
        "loss": lambda v: f"loss {v:.4f}",
        "lr": lambda v: f"lr {v:.3e}",
        "grad_norm": lambda v: f"grad {v:.3f}",
        "tokens_per_second": lambda v: f"{short_number(v)} tok/s",
        "tflops": lambda v: f"{v:.3g} TFLOP/s",
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
    parts = {name: shown[name](values[name]) for name in there}
    for name in LEAST_FIRST:
        if width is None or len(_joined(parts)) <= width:
            break
        parts.pop(name, None)
    return _joined(parts)


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(parts.values()).replace("  of ", " of ")


def columns_of(file: TextIO) -> int | None:
    """Columns of the terminal behind a file, or what COLUMNS says; None where any width does."""
    if file.isatty():
        return shutil.get_terminal_size().columns
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdigit() and int(given) else None


def validation_line(record: Mapping[str, Any]) -> str:
    sets = "  ".join(
        f"{'' if name == 'validation' else name + ': '}loss {values['loss']:.4f} perplexity {values['perplexity']:.2f}"
        + (f" bits/byte {values['bits_per_byte']:.4f}" if "bits_per_byte" in values else "")
        for name, values in record["validation"].items()
    )
    return f"validation after {counted(record['step'], 'step')}  {sets}"


def task_lines(record: Mapping[str, Any]) -> list[str]:
    """A line for each benchmark task; standard errors are in the file."""
    return [
        f"{task} after {counted(record['step'], 'step')}  "
        + "  ".join(f"{name} {value:.4f}" for name, value in values.items() if "_stderr" not in name)
        for task, values in record["tasks"].items()
    ]


class MetricsConsole:
    """The console sink.

    Args:
        mode: auto (live on a terminal), live, plain or quiet.
        total: steps of the whole run.
        file: where to write; standard output by default.
    """

    def __init__(self, mode: str, total: int, file: TextIO | None = None) -> None:
        self.file = sys.stdout if file is None else file
        self.total = total
        self.mode = ("live" if self.file.isatty() else "plain") if mode == "auto" else mode
        self._live: Live | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.mode == "quiet":
            return
        if "validation" in record:
            self.log(validation_line(record))
        elif "tasks" in record:
            for line in task_lines(record):
                self.log(line)
        elif "lr" not in record:
            return  # a record of a user's hook: the console does not know how to show it
        elif self.mode == "live":
            self._show(record)
        else:
            self.log(training_line(record, self.total, columns_of(self.file)))

    def log(self, text: str) -> None:
        """Print a message; on a terminal it scrolls by above the live line."""
        if self.mode == "quiet":
            return
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.file, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, record: Mapping[str, Any]) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        columns = columns_of(self.file) if self.file.isatty() else None
        room = None if columns is None else columns - BAR - 1
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=self.total, completed=record["step"] + 1, width=BAR),
            Text(training_line(record, self.total, room)),
        )
        if self._live is None:
            terminal = Terminal(file=self.file, force_terminal=True)
            self._live = Live(grid, console=terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(grid, refresh=True)
