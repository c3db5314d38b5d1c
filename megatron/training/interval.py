"""The interval between saves with the least lost time: `checkpoint.auto`, by Young and Daly, from measurements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.sections.output import LevelSection
from megatron.report.goodput import best_interval, goodput
from megatron.report.ledger import read_ledger

# Prior for an unknown cluster: Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783),
# which is one in 50,700 hours of a GPU.
DEVICE_HOURS = 50_700.0
FIRST = 300.0  # seconds until the first save of a run, which measures the cost
LEAST = 60.0  # seconds between two saves
RANK, HOST = "rank", "host"  # extent of a failure


class Interval:
    """Costs of a run's saves and its failures so far.

    The mean time between failures is (prior + wall time so far) / (1 + failures so far). The prior is the time in which
    a cluster of that many devices has one failure.

    Args:
        config: of the run. Its ledger has the earlier starts.
        devices: number of ranks.
        kinds: failures after which the run would resume from these saves. None: all.
    """

    def __init__(self, config: Config, devices: int, kinds: Collection[str] | None = None) -> None:
        file = Path(config.run.dir) / "ledger.jsonl"
        entries = read_ledger(file) if file.exists() else []
        account = goodput(entries)
        self._prior = 3600 * DEVICE_HOURS / devices
        self._wall = account.wall
        self._failures = account.failures if kinds is None else failures(entries, kinds)
        saves = (each for each in entries if each["event"] == "checkpoint" and kinds is None)
        self._costs = [each["stall_seconds"] for each in saves if "stall_seconds" in each]

    def saved(self, stall: float) -> None:
        """Add the seconds that training stood still for a save."""
        self._costs.append(stall)

    def between(self, now: float) -> float:
        """Mean seconds between failures, `now` seconds after this start."""
        return (self._prior + self._wall + now) / (1 + self._failures)

    def seconds(self, now: float) -> float:
        """Seconds between two saves, `now` seconds after this start."""
        return max(self.least_waste(now), LEAST) if self._costs else FIRST

    def least_waste(self, now: float) -> float:
        """The same without a minimum. There must have been a save."""
        recent = self._costs[-10:]
        return best_interval(sum(recent) / len(recent), self.between(now))


def failures(entries: Iterable[Mapping[str, Any]], kinds: Collection[str]) -> int:
    """Number of failures of these kinds in a ledger. If a whole host fails, no rank is named."""
    ends = (entry for entry in entries if entry["event"] in ("restart", "given_up"))
    return sum((HOST if entry.get("rank") is None else RANK) in kinds for entry in ends)


def failures_answered(sections: Sequence[LevelSection], number: int) -> set[str]:
    """The kinds of failures after which a run resumes from level `number`: no nearer level survives them."""

    def survived(section: LevelSection) -> set[str]:
        return {RANK, HOST} if section.neighbours else {RANK}

    nearer = set[str]().union(*(survived(section) for section in sections[:number]))
    return survived(sections[number]) - nearer
