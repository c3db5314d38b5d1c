"""The comparison of plans and rehearsals with one device, on a CPU: bytes against those counted, and rows that stay."""

from __future__ import annotations

import json

import pytest
import yaml

from bench.plan import plan_device
from bench.plan.plan_device import CASES, DEFAULT, configured, markdown
from bench.runner import run
from megatron.plan.devices import known_devices

CASE = "tiny neox"


@pytest.mark.tour
def test_a_row_is_made_in_parts_and_kept(tmp_path, capsys):
    rows, asked = tmp_path / "rows.json", ["--cases", CASE, "--gpu", "cpu", "--json", str(tmp_path / "rows.json")]
    assert run("plan_device", [*asked, "--parts", "planned", "rehearsed"]) == 0
    assert run("plan_device", [*asked, "--parts", "measured", "--limit", "0.01"]) == 1
    assert "not done" in json.loads(rows.read_text())[0]["measured"]["error"]
    assert run("plan_device", [*asked, "--parts", "measured", "--seconds", "0.1"]) == 0
    (row,) = json.loads(rows.read_text())
    assert row["case"] == CASE and row["rehearsed"]["tensors"] == pytest.approx(row["measured"]["tensors"], rel=0.05)
    assert row["measured"]["fastest"] <= row["measured"]["seconds"] <= row["measured"]["slowest"]
    capsys.readouterr()
    assert run("plan_device", asked) == 0
    told = capsys.readouterr()
    assert told.err == "" and f"| {CASE} |" in told.out and json.loads(rows.read_text()) == [row]


def test_a_row_of_other_overrides_is_made_anew(tmp_path):
    asked = ["--cases", CASE, "--gpu", "cpu", "--parts", "planned", "--json", str(tmp_path / "rows.json")]
    assert run("plan_device", asked) == 0
    (before,) = json.loads((tmp_path / "rows.json").read_text())
    assert run("plan_device", [*asked, "--set", "training.activation_checkpointing.mode=full"]) == 0
    (after,) = json.loads((tmp_path / "rows.json").read_text())
    assert after["planned"]["parts"]["activations"] < before["planned"]["parts"]["activations"]


def test_parts_of_another_device_are_made_anew(tmp_path, monkeypatch):
    """Of an entry of the same name with other figures, and measured elsewhere."""
    file, entry = tmp_path / "rows.json", known_devices()[0]["cpu"].model_dump()
    monkeypatch.setattr(plan_device, "in_process", lambda _name, _more, device, *_: {"seconds": 1.0, "on": device})

    def row(device: str, bandwidth: float) -> dict:
        machine = tmp_path / f"{bandwidth}.yml"
        machine.write_text(yaml.safe_dump({"devices": {"mine": {**entry, "bandwidth": bandwidth}}}))
        words = ["--cases", CASE, "--parts", "planned", "measured", "--json", str(file), "--device", device]
        assert run("plan_device", [*words, "--gpu", "mine", "--machine", str(machine)]) == 0
        return json.loads(file.read_text())[0]

    first, slower, other = row("cpu", 100.0), row("cpu", 1.0), row("cuda", 1.0)
    assert slower["planned"]["seconds"] > first["planned"]["seconds"] and slower["measured"] == first["measured"]
    assert other["planned"] == slower["planned"]
    assert (slower["measured"]["on"], other["measured"]["on"]) == ("cpu", "cuda")


def test_every_case_is_a_configuration():
    for name in CASES:
        training = configured(name, []).training
        assert training.accumulation == 2 and (training.sequence_length == 2048 or name not in DEFAULT)


def test_errors_are_relative_to_what_was_measured():
    real = {"tensors": 2**31, "process": 2**32, "reserved": 2**31, "seconds": 0.5}
    plan = {"tensors": 2**30, "total": 2**33, "seconds": 0.6}
    text = markdown([{"case": "a", "measured": real, "planned": plan}])
    assert "| a | 2.00 | 1.00 | -50.0% |  |  | 2.00 | 4.00 | 8.00 | +100.0% |" in text
    assert "| a | 500.0 | 600.0 | +20.0% |" in text and "median error 20.0%" in text
