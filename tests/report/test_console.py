"""Lines of the console, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import re

import pytest

from megatron.launch.report.console import STATUS, RankConsole, log
from megatron.report.console import (
    ERASE,
    MetricsConsole,
    StatusLine,
    duration,
    progress_line,
    short_number,
    training_line,
    wrapped,
)

RECORD = {
    "step": 41,
    "loss": 3.14159,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "tokens": 42 * 1024,
    "tokens_per_second": 12345.6,
    "tflops": 407.2,
    "mfu": 0.4117,
    "peak_tflops": 989.0,
    "memory_bytes": 3 * 2**29,
    "eta_seconds": 3723.0,
}


class Terminal(io.StringIO):
    """Text written to a terminal, and the rows that it would show."""

    columns = 80

    def isatty(self):
        return True

    @property
    def buffer(self):
        return self

    def write(self, text):
        return super().write(text.decode() if isinstance(text, bytes) else text)

    def rows(self):
        """A terminal that knows the codes in use, and wraps at its width."""
        rows, row, column = [""], 0, 0
        for code, text in re.findall(r"(\x1b\[\d*[A-Za-z]|[\r\n])|([^\x1b\r\n])", self.getvalue()):
            if code == "\r":
                column = 0
            elif code == "\n":
                row, column = row + 1, 0
            elif code == "\x1b[K":
                rows[row] = rows[row][:column]
            elif code == "\x1b[J":
                rows[row:] = [rows[row][:column]]
            elif code.endswith("A"):
                row -= int(code[2:-1])
            else:
                if column == self.columns:
                    row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + 1 :]
                column += 1
            rows += [""] * (row + 1 - len(rows))
        return rows


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((Terminal.columns, 24)))


def test_a_line_says_it_all():
    line = training_line(RECORD, 1000)
    for text in (
        "step   41",
        "4.2%",
        "loss 3.1416",
        "lr 3.000e-04",
        "grad 0.500",
        "12.3k tok/s",
        "407 TFLOP/s",
        "MFU 41.2% of 989 TFLOP/s",
        "mem 1.50 GiB",
        "ETA 1:02:03",
    ):
        assert text in line
    without = training_line({**RECORD, "mfu": None, "grad_norm": None}, 1000)
    assert "MFU" not in without and "grad" not in without


@pytest.mark.parametrize(
    "number, text",
    [
        (0.5, "0.500"),
        (7, "7"),
        (998.2, "998"),
        (999.7, "1.00k"),
        (1072, "1.07k"),
        (12_000, "12.0k"),
        (999_600, "1.00M"),
        (4_560_000, "4.56M"),
        (2e12, "2.00T"),
    ],
)
def test_short(number, text):
    assert short_number(number) == text


@pytest.mark.parametrize("seconds, text", [(59.6, "0:01:00"), (3723, "1:02:03"), (2 * 86400 + 3723, "2d 01:02:03")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    console = MetricsConsole("auto", 1000, out)
    console.write(RECORD)
    console.write({"step": 42, "validation": {"pile": {"loss": 2.0, "perplexity": 7.389, "tokens": 10}}})
    console.write({"step": 43, "validation": {"validation": {"loss": 2.0, "perplexity": 7.389, "tokens": 10}}})
    console.log("a message")
    console.close()
    assert out.getvalue().splitlines() == [
        training_line(RECORD, 1000),
        "validation after 42 steps  pile: loss 2.0000 perplexity 7.39",
        "validation after 43 steps  loss 2.0000 perplexity 7.39",
        "a message",
    ]


def test_a_terminal_keeps_a_line_per_record_and_shows_a_bar_below_them():
    out = Terminal()
    console = MetricsConsole("auto", 1000, out)
    assert console.mode == "live"
    for step in range(3):
        console.write({**RECORD, "step": step})
    console.log("saved [bold]checkpoint[/bold]")
    lines = [training_line({**RECORD, "step": step}, 1000, Terminal.columns, bar=True) for step in range(3)]
    assert all("loss 3.1416" in line and "tok/s" in line and "mem 1.50 GiB" in line for line in lines)
    shown = [*lines, "saved [bold]checkpoint[/bold]"]
    assert out.rows() == [*shown, "[----------------]   0.3%  3 of 1,000 steps  ETA 1:02:03"]
    console.close()
    assert out.rows() == [*shown, ""]


def test_a_narrower_window_keeps_no_second_bar():
    out = Terminal()
    console = MetricsConsole("auto", 1000, out)
    console.write(RECORD)
    bar = StatusLine()
    bar.text = out.rows()[-1]
    narrow = Terminal()
    narrow.columns = 30  # a terminal wraps again what it shows
    narrow.write("above\n" + bar.drawn())
    assert len(narrow.rows()) == 3
    narrow.write(bar.removed(30))
    assert narrow.rows() == ["above", ""]


@pytest.mark.parametrize("width", [20, 40, 66, 120])
def test_a_bar_fits(width):
    for done in (0, 1, 1_999_999, 2_000_000):
        line = progress_line(done, 2_000_000, 5e5, width)
        assert len(line) < width and line.startswith("[")
    assert "ETA 5d 18:53:20" in progress_line(1_999_999, 2_000_000, 5e5, 120)


def test_no_word_is_broken():
    text = "torch.compile: off (auto: on CPU it gains nothing, or too little for its start and memory)"
    lines = wrapped(text, 40).splitlines()
    assert all(len(line) <= 40 for line in lines) and " ".join(" ".join(lines).split()) == text
    path = "/a/very/long/path" * 5
    assert wrapped(path, 40) == path and wrapped(text, None) == text


def test_the_launcher_writes_above_the_bar(monkeypatch):
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", out)
    console, bar = RankConsole(plain=True), "[####]  25.0%"
    console.show("a", 0, 1, f"step 0\n{ERASE}{bar[:3]}")
    console.show("a", 0, 1, bar[3:])
    log("SIGINT: passed on")
    console.show("a", 1, 1, "another rank\n")
    console.show("a", 0, 2, "a warning\n")
    console.show("a", 0, 1, "printed by a script\n")
    shown = ["step 0", "deepy: SIGINT: passed on", "[a:1] another rank", "a warning", "printed by a script"]
    assert out.rows() == [*shown, bar]
    console.show("a", 0, 1, f"{ERASE}step 1\n{ERASE}{bar}")
    assert out.rows() == [*shown, "step 1", bar]
    console.close()  # rank 0 was killed
    assert out.rows() == [*shown, "step 1", ""] and not STATUS.text


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_record_of_a_users_hook_is_no_training_line(mode):
    out = Terminal()
    console = MetricsConsole(mode, 1000, out)
    console.write({"step": 3, "weights": {"embedding": {"norm": 1.0}}})
    console.close()
    assert out.getvalue() == ""


def test_quiet_is_quiet():
    out = io.StringIO()
    console = MetricsConsole("quiet", 10, out)
    console.write(RECORD)
    console.log("x")
    console.close()
    assert out.getvalue() == ""


def test_a_narrow_line_leaves_out_the_least_important():
    whole = training_line(RECORD, 1000)
    assert training_line(RECORD, 1000, len(whole)) == whole
    for width in range(24, len(whole)):
        line = training_line(RECORD, 1000, width)
        assert len(line) <= width and line.startswith("step ") and "loss " in line
    assert "of 989" not in training_line(RECORD, 1000, len(whole) - 1)
    assert "ETA" in training_line(RECORD, 1000, 80) and "lr " in training_line(RECORD, 1000, 80)
    assert "skipped: overflow" in training_line({**RECORD, "skipped": True}, 1000, 60)
    assert (
        training_line({"step": 0, "loss": 0.0, "lr": 0.0}, 10).split()
        == "step 0 10.0% loss 0.0000 lr 0.000e+00".split()
    )


def test_columns_of_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    MetricsConsole("auto", 1000, file).write(RECORD)
    monkeypatch.setenv("COLUMNS", "60")
    MetricsConsole("auto", 1000, file).write(RECORD)
    wide, narrow = file.getvalue().splitlines()
    assert len(narrow) <= 60 < len(wide)
