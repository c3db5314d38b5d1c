"""What is shown, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from megatron.report.console import MetricsConsole, duration, short_number, training_line

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
    def isatty(self):
        return True


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
    "number, text", [(0.5, "0.5"), (999, "999"), (12_345, "12.3k"), (4_560_000, "4.56M"), (2e12, "2T")]
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


def test_live_line_on_a_terminal_leaves_messages_above():
    out = Terminal()
    console = MetricsConsole("auto", 1000, out)
    assert console.mode == "live"
    for step in range(3):
        console.write({**RECORD, "step": step})
    console.log("saved [bold]checkpoint[/bold]")
    console.close()
    for text in ("saved [bold]checkpoint[/bold]", "\x1b[", "loss 3.14"):
        assert text in out.getvalue()


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
    assert "mem " not in training_line(RECORD, 1000, len(whole) - 1)
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
