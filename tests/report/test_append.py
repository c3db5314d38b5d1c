"""A full disk: the run continues, nothing is torn, and what waited is written when there is room."""

from __future__ import annotations

import errno
import json
import os

import pytest

from megatron.report import append
from megatron.report.append import AppendFile
from megatron.report.jsonl import MetricsFile
from megatron.report.ledger import Ledger, read_ledger


@pytest.fixture
def disk(monkeypatch):
    """Room on a disk, in bytes: `os.write` writes in part and then fails, as a real one does."""
    state = {"room": 10**9}
    write = os.write

    def limited(handle: int, data) -> int:
        if handle <= 2:
            return write(handle, data)
        if state["room"] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(handle, bytes(data)[: state["room"]])
        state["room"] -= count
        return count

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr(append, "AGAIN", 0.0)
    return state


def test_nothing_is_torn_or_lost_and_it_is_said_once(tmp_path, disk):
    said = []
    file = AppendFile(tmp_path / "a" / "log", complain=said.append)
    file.write(b"first\n")
    disk["room"] = 3
    for number in range(5):
        file.write(b"line %d\n" % number)
    assert (tmp_path / "a/log").read_bytes() == b"first\n" and len(said) == 1
    assert "No space left" in said[0] and file.waiting == 35
    disk["room"] = 10**6
    file.write(b"last\n")
    assert (tmp_path / "a/log").read_bytes() == b"first\n" + b"".join(b"line %d\n" % n for n in range(5)) + b"last\n"
    assert len(said) == 2 and "nothing is missing" in said[1]
    file.close()


def test_memory_is_bounded_and_the_gap_is_shown(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(append, "ROOM", 100)
    said = []
    file = AppendFile(tmp_path / "log", complain=said.append, gap=lambda lost: b"[%d lost]\n" % lost)
    disk["room"] = 0
    for _ in range(50):
        file.write(b"x" * 9 + b"\n")
    assert file.waiting <= 100
    disk["room"] = 10**6
    file.close()
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert lines[0] == b"[400 lost]" and len(lines) == 11 and "400 bytes are missing" in said[-1]


def test_metrics_and_ledger_outlive_a_full_disk(tmp_path, disk, capsys):
    metrics, ledger = MetricsFile(tmp_path / "metrics.jsonl"), Ledger(tmp_path / "ledger.jsonl")
    ledger.write("start", step=0)
    disk["room"] = 7
    for step in range(3):
        metrics.write({"step": step, "loss": 1.0})
        ledger.write("checkpoint", step=step)
    before = ledger.position()
    disk["room"] = 10**6
    metrics.close()
    ledger.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert [each.get("step") for each in read_ledger(tmp_path / "ledger.jsonl")] == [0, 0, 1, 2]
    assert (tmp_path / "ledger.jsonl").stat().st_size == before
    assert capsys.readouterr().err.count("No space left") == 2


def test_a_place_that_is_not_there_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        AppendFile(tmp_path / "file" / "log")
