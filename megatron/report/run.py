"""A run's directory, opened for writing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config

from .jsonl import put_aside, sound_metrics, sound_sample, supersede
from .ledger import Ledger
from .sinks import Sinks, open_sinks


def put_damage_aside(folder: Path) -> None:
    """Lines of a run's files that a disk has damaged go to <name>.damaged.jsonl, each with a warning."""
    if (ledger := folder / "ledger.jsonl").exists():
        Ledger(ledger).close()
    put_aside(folder / "metrics.jsonl", sound_metrics)
    put_aside(folder / "samples.jsonl", sound_sample)


def open_run(
    config: Config, *, rank: int, start: int, settings: Mapping[str, Any] | None = None
) -> tuple[Sinks, Ledger | None]:
    """The sinks and the ledger of a run that goes on from `start` completed updates.

    Lines of metrics.jsonl that will be written again are moved aside, and the ledger says so. Ranks above 0 get silent
    sinks and no ledger.

    Args:
        settings: see `open_sinks`.
    """
    if rank:
        return open_sinks(config, rank=rank), None
    folder = Path(config.run.dir)
    ledger = Ledger(folder / "ledger.jsonl")
    lines = supersede(folder / "metrics.jsonl", start)
    if lines:
        ledger.write("superseded", step=start, lines=lines, moved_to="metrics.superseded.jsonl")
    return open_sinks(config, start=start, settings=settings), ledger
