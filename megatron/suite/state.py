"""Progress of a suite's runs, and whether they have read the same batches, from their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config import Config
from megatron.config.frozen import thaw
from megatron.report.jsonl import read_lines, sound_metrics
from megatron.report.ledger import read_ledger

from .members import Member

AVERAGED = 20  # the closing loss is the mean over this part of the steps: a twentieth
# Keys that determine the batches of a run, in addition to its data.
_READ = ("global_batch_size", "sequence_length", "seed")
_NOT_READ = ("cache", "workers", "prefetch", "validation", "test")


@dataclass(frozen=True)
class State:
    """State of a member's run, from its files.

    Attributes:
        batches: step -> hash of the batch that the newest weights have seen.
        validation, tasks: the last values by name.
    """

    word: str = "waiting"  # waiting, running (or killed), stopped, failed or finished
    step: int = 0  # updates made
    losses: Mapping[int, float] = field(default_factory=dict)  # step -> training loss
    batches: Mapping[int, str] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Mean training loss over the last twentieth of the logged steps."""
        values = [self.losses[step] for step in sorted(self.losses)]
        tail = values[-max(len(values) // AVERAGED, 1) :]
        return sum(tail) / len(tail) if tail else None


def state_of(member: Member) -> State:
    """Read a member's files. A member that has not begun has none.

    Raises:
        OSError: a file cannot be read.
    """
    ledger, metrics = member.folder / "ledger.jsonl", member.folder / "metrics.jsonl"
    word, step, batches = "waiting", 0, dict[int, str]()
    for event in read_ledger(ledger) if ledger.is_file() else ():
        name = event.get("event")
        if name == "batches":
            batches |= {event["first_step"] + place: value for place, value in enumerate(event["hashes"])}
        elif name in ("start", "resume"):
            word, step = "running", event["step"]
            batches = {at: value for at, value in batches.items() if at < step}
        elif name in ("end", "stop", "error"):
            word = {"end": "finished", "stop": "stopped", "error": "failed"}[name]
            step = event.get("step") or step
    losses, validation, tasks = dict[int, float](), dict[str, float](), dict[str, float]()
    for record in read_lines(metrics, sound_metrics) if metrics.is_file() else ():
        if record.get("loss") is not None:
            losses[record["step"]] = record["loss"]
            batches.setdefault(record["step"], record.get("batch_hash", ""))
            step = max(step, record["step"] + 1)
        validation |= {name: each["loss"] for name, each in record.get("validation", {}).items()}
        tasks |= {f"{name} {_main(each)}": each[_main(each)] for name, each in record.get("tasks", {}).items() if each}
    return State(word, step, losses, batches, validation, tasks)


def _main(metrics: Mapping[str, float]) -> str:
    return next((name for name in ("acc_norm", "acc") if name in metrics), next(iter(metrics)))


def data_group(config: Config) -> str:
    """A short name that runs with the same batches share."""
    data = {key: value for key, value in thaw(config.data.model_dump()).items() if key not in _NOT_READ}
    training = {key: getattr(config.training, key) for key in _READ}
    if schedule := config.training.sequence_schedule:
        training["sequence_schedule"] = [(each.until, each.sequence_length) for each in schedule]
    if batches := config.training.batch_schedule:
        training["batch_schedule"] = [each.model_dump() for each in batches]
    text = json.dumps([data, training, thaw(config.tokenizer.model_dump())], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Agreement:
    """Whether the runs of a group have read the same batches.

    Attributes:
        unlike: (step, member, other member) of the first step with different batches, or None.
    """

    members: tuple[str, ...]  # names of members that have read any
    steps: int  # steps that more than one of them has made
    unlike: tuple[int, str, str] | None


def agreement(states: Mapping[str, State]) -> Agreement:
    """Compare the batch hashes of runs step by step."""
    seen: dict[int, tuple[str, str]] = {}
    shared: set[int] = set()
    unlike: tuple[int, str, str] | None = None
    for name, state in states.items():
        for step, value in state.batches.items():
            other, first = seen.setdefault(step, (name, value))
            if other == name:
                continue
            shared.add(step)
            if value != first and (unlike is None or step < unlike[0]):
                unlike = (step, other, name)
    return Agreement(tuple(name for name, state in states.items() if state.batches), len(shared), unlike)
