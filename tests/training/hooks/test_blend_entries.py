"""Changes of the blend in the ledger, at the steps where the samples change."""

from __future__ import annotations

from pathlib import Path

from megatron.data.provenance import Provenance, run_config
from megatron.report.ledger import left_out, read_ledger
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_sizes
from tools.data.mixture import main, options


def test_each_change_of_the_blend_is_an_entry(tmp_path: Path) -> None:
    """Also where a run skips batches, which moves the change, and after a resume. The tool adds up what was read."""
    for name in ("web", "books"):
        write_sizes(tmp_path / name, [30] * 40, seed=len(name))
    web, books = ({"path": str(tmp_path / name), "weight": weight} for name, weight in (("web", 0.75), ("books", 0.25)))
    values = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"layers": "attention/mlp", "hidden_size": 16, "vocab_size": 1000, "attention": {"heads": 2}},
        "training": {"steps": 8, "sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 2},
        "data": {
            "train": [web, books],
            "phases": [{"start": 5, "sources": [books]}],
            "left_out": [{"step": 2, "batches": 2}],
        },
        "checkpoint": {"every": 2},
        "logging": {"every": 1, "console": "quiet", "curve": False},
    }
    train_on_ranks(1, values)
    entries = [each for each in read_ledger(tmp_path / "run/ledger.jsonl") if each["event"] == "blend"]
    found = [(each["step"], each["weights"]) for each in entries]
    assert found == [(0, {"web": 0.75, "books": 0.25}), (3, {"books": 0.25})]
    assert all(each["time"] for each in entries)
    provenance = Provenance(run_config(tmp_path / "run"))
    counts = []
    for step in range(8):
        sources = [piece.source for each in provenance.step(step) for piece in each.pieces]
        counts.append("web" in sources)
    assert counts[:3] == [True] * 3 and not any(counts[3:])
    assert left_out(tmp_path / "run/ledger.jsonl") is not None
    points = main(options().parse_args(["show", str(tmp_path / "run"), "--points", "4"]))["points"]
    assert {each["step"]: each["tokens"]["web"] for each in points}[4] == points[-1]["tokens"]["web"] == 9 * 16
    assert all(sum(each["tokens"].values()) == each["step"] * 4 * 16 and each["read"] for each in points)
