"""How often to save so that least time is lost: `checkpoint.auto`, by Young and Daly, from what was measured."""

from __future__ import annotations

from pathlib import Path

from megatron.config import Config
from megatron.report.goodput import best_interval, goodput
from megatron.report.ledger import read_ledger

# Before anything is known of a cluster: Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs
# (arXiv 2407.21783), which is one in 50,700 hours of a GPU.
DEVICE_HOURS = 50_700.0
FIRST = 300.0  # seconds until the first save of a run, which then tells what one costs
LEAST = 60.0  # seconds between two saves


class Interval:
    """What is known of the costs of a run's saves and of its failures.

    The mean time between failures is (prior + wall time so far) / (1 + failures so far): as if one failure had been
    seen in the time in which a cluster of that many devices has one.

    Args:
        config: of the run, whose ledger tells of earlier starts.
        devices: ranks.
    """

    def __init__(self, config: Config, devices: int) -> None:
        file = Path(config.run.dir) / "ledger.jsonl"
        entries = read_ledger(file) if file.exists() else []
        account = goodput(entries)
        self._prior = 3600 * DEVICE_HOURS / devices
        self._wall, self._failures = account.wall, account.failures
        self._costs = [float(each["stall_seconds"]) for each in entries if each["event"] == "checkpoint"]

    def saved(self, stall: float) -> None:
        """Training has stood still for a save."""
        self._costs.append(stall)

    def between(self, now: float) -> float:
        """Mean seconds between failures, `now` seconds after this start."""
        return (self._prior + self._wall + now) / (1 + self._failures)

    def seconds(self, now: float) -> float:
        """Between two saves, `now` seconds after this start."""
        if not self._costs:
            return FIRST
        recent = self._costs[-10:]
        return max(best_interval(sum(recent) / len(recent), self.between(now)), LEAST)
