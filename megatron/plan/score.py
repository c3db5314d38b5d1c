"""Predictions against published speeds of runs: the fit of efficiencies, and the remaining errors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megatron.config.source.layers import ConfigSource

from .candidate import Candidate, apply, parse
from .devices import Device, Efficiency, cluster, known_devices
from .search import Question
from .step import StepEstimator

FILE = Path(__file__).with_name("published.yml")
GRID = tuple(share / 100 for share in range(20, 100, 2))
ROUNDS = 4


@dataclass(frozen=True)
class PublishedRun:
    """A published run. `published.yml` has the meaning of its values."""

    values: Mapping[str, Any]

    @property
    def number(self) -> int:
        return self.values["id"]

    @property
    def fitted(self) -> bool:
        """Whether efficiencies are fitted to it."""
        return self.number % 2 == 0

    def config(self) -> dict[str, Any]:
        """The run as a configuration."""
        own = self.values
        gated = own.get("gated", False)
        attention = {"heads": own["heads"], "kv_heads": own.get("kv_heads", own["heads"])}
        return {
            "model": {
                "layers": f"(attention/mlp) x{own['layers']}",
                "hidden_size": own["hidden"],
                "vocab_size": own["vocab"],
                "attention": attention,
                "mlp": {"hidden_size": own.get("ffn", 4 * own["hidden"]), "gated": gated},
                "embedding": {"tied": not gated},
            },
            "training": {"steps": 1, "sequence_length": own["length"], "global_batch_size": own["batch"]},
            "precision": {"compute": "bf16", "reduce": "bf16"},
            "data": {"synthetic": "copy"},
        }

    @property
    def choice(self) -> Candidate:
        return Candidate(**parse(self.values["layout"], "layout"))

    def measured(self, question: Question) -> float:
        """Tokens per second of a device."""
        own = self.values
        if "tokens" in own:
            return own["tokens"]
        tokens = own["batch"] * own["length"]
        if "seconds" in own:
            return tokens / own["seconds"] / own["gpus"]
        if "mfu" in own:
            return own["mfu"] * question.at.device.peak("bf16") / question.flops
        L, h, s, V = own["layers"], own["hidden"], own["length"], own["vocab"]
        return own["tflops"] * 1e12 / (96 * L * h * h * (1 + s / (6 * h) + V / (16 * L * h)))


@dataclass(frozen=True)
class Scored:
    """A run with its prediction: tokens per second of a device."""

    run: PublishedRun
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction is too fast."""
        return self.predicted / self.measured - 1


@cache
def runs() -> tuple[PublishedRun, ...]:
    return tuple(PublishedRun(each) for each in yaml.safe_load(FILE.read_text(encoding="utf-8"))["runs"])


@cache
def _question(number: int) -> Question:
    own = next(each for each in runs() if each.number == number)
    network = "ib200" if own.values["gpu"] == "a100" else "ib400"
    at = cluster(own.values["gpus"], own.values["gpu"], network=network)
    return Question.from_sources([ConfigSource(own.config())], at)


def score(chosen: Iterable[PublishedRun] | None = None, devices: Mapping[str, Device] | None = None) -> list[Scored]:
    """Predictions of runs, with other devices of the same names where some are given."""
    found = []
    for run in runs() if chosen is None else chosen:
        question = _question(run.number)
        device = (devices or known_devices()[0])[run.values["gpu"]]
        clock = StepEstimator(question.base, question.shapes, replace(question.at, device=device))
        step = clock.step(apply(question.base, run.choice, question.at.devices), run.choice)
        tokens = run.values["batch"] * run.values["length"] / step.seconds / question.at.devices
        found.append(Scored(run, run.measured(question), tokens))
    return found


def fit() -> dict[str, dict[str, float]]:
    """Each device's shares with the least mean error on its runs that may be fitted, one share after the other."""
    return {gpu: _fitted(gpu, known_devices()[0][gpu]) for gpu in dict.fromkeys(run.values["gpu"] for run in runs())}


def _fitted(name: str, device: Device) -> dict[str, float]:
    chosen = [run for run in runs() if run.fitted and run.values["gpu"] == name]

    def loss(shares: Mapping[str, float]) -> float:
        own = device.model_copy(update={"efficiency": Efficiency(**shares)})
        return sum(abs(log(each.predicted / each.measured)) for each in score(chosen, {name: own}))

    shares = device.efficiency.model_dump()
    for _ in range(ROUNDS):
        for part in ("matrix", "attention"):
            losses = {share: loss({**shares, part: share}) for share in GRID}
            shares[part] = min(GRID, key=losses.__getitem__)
    return shares


def summary(scored: list[Scored]) -> dict[str, float]:
    """The median and the largest error, as factors less 1."""
    errors = [abs(log(each.predicted / each.measured)) for each in scored]
    return {"median": exp(median(errors)) - 1, "worst": exp(max(errors)) - 1}


def markdown(scored: list[Scored]) -> str:
    """The table of docs/planning.md."""
    lines = [
        "| | run | source | devices | layout | measured | predicted | error |",
        "|--:|---|---|---|---|--:|--:|--:|",
    ]
    for each in sorted(scored, key=lambda each: (each.run.fitted, each.run.number)):
        own, use = each.run.values, "fitted" if each.run.fitted else "scored"
        lines.append(
            f"| {own['id']} | {own['name']} ({use}) | {own['source']} | {own['gpus']:,} {own['gpu']} "
            f"| {each.run.choice} | {each.measured:,.0f} | {each.predicted:,.0f} | {each.error:+.0%} |"
        )
    return "\n".join(lines)
