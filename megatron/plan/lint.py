"""Sizes of a model that a device computes slowly: the rules of co-design, each with the nearest better values.

Anthony et al. 2024 (arXiv 2401.14489): matrices are fast if their sizes are multiples of 64 elements (128 bytes) and
tiles fill the last wave of the device's units. They should be split as little as possible. A finding may have a change
that keeps the number of parameters within 2 %, with its predicted gain."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.config import ConfigError
from megatron.config.source.layers import ConfigSource
from megatron.config.variants import options_of
from megatron.model.costs.describe import totals

from .candidate import Candidate
from .search import AXES, Plan, Question

UNIT = 64  # elements of 16 bits: beyond it alignment gains nothing
SAME = 0.02  # of the parameters: what a change may add or take away
WORTH = 0.002  # of a step: gains below it are not shown


@dataclass(frozen=True)
class LintFinding:
    """A breach of a rule."""

    rule: str  # its name
    key: str  # of the configuration
    value: Any  # that it has
    text: str  # what is wrong
    better: dict[str, Any]  # values by key, empty if there are none
    gain: float = 0.0  # the share of the step that these would save, as predicted
    parameters: float = 0.0  # the relative change of the number of parameters

    def __str__(self) -> str:
        values = " ".join(f"{key}={value}" for key, value in self.better.items())
        fix = f"\n    better: {values} ({self.parameters:+.1%} parameters, {self.gain:.1%} less time)" if values else ""
        return f"{self.rule}: {self.key} = {self.value}\n    {self.text}{fix}"


def lint(question: Question, choice: Candidate) -> list[LintFinding]:
    """All findings for a layout, those with the largest gain first."""
    at = _Checker(question, choice)
    found = chain(at.vocabulary(), at.heads(), at.widths(), at.layers(), at.batch(), at.tensor())
    return sorted(found, key=lambda each: -each.gain)


class _Checker:
    def __init__(self, question: Question, choice: Candidate) -> None:
        self.question, self.choice, self.base = question, choice, question.base
        self.plan = question.judge(choice)
        self.parameters = totals(question.base).parameters

    def tried(self, values: dict[str, Any]) -> tuple[float, float] | None:
        """(share of the step saved, change of parameters) with other values. None if they are not valid."""
        nested: dict[str, Any] = {}
        for key, value in values.items():
            at = nested
            *path, last = key.split(".")
            for part in path:
                at = at.setdefault(part, {})
            at[last] = value
        question = self.question
        try:
            other = Question.from_sources([*question.sources, ConfigSource(nested)], question.at)
            if other.refusal(self.choice) is not None:
                return None
            plan: Plan = other.judge(self.choice)
        except (ConfigError, ValueError):
            return None
        return 1 - plan.step.seconds / self.plan.step.seconds, totals(other.base).parameters / self.parameters - 1

    def best(self, options: list[dict[str, Any]]) -> tuple[dict[str, Any], float, float]:
        """The change that saves most at an equal number of parameters."""
        found: tuple[dict[str, Any], float, float] = ({}, 0.0, 0.0)
        for values in options:
            result = self.tried(values)
            if result is not None and abs(result[1]) <= SAME and result[0] > max(found[1], WORTH):
                found = (values, *result)
        return found

    def finding(self, rule: str, key: str, value: Any, text: str, options: list[dict[str, Any]]) -> LintFinding:
        return LintFinding(rule, key, value, text, *self.best(options))

    def vocabulary(self) -> Iterator[LintFinding]:
        vocab, unit = self.base.model.vocab_size, UNIT * self.choice.grid
        if vocab % unit:
            above = -(-vocab // unit) * unit
            times = f" times tensor parallel {self.choice.grid}" if self.choice.grid > 1 else ""
            text = f"the head's rows must be a multiple of {UNIT}{times} = {unit} for full speed"
            yield self.finding("vocabulary-alignment", "model.vocab_size", vocab, text, [{"model.vocab_size": above}])

    def heads(self) -> Iterator[LintFinding]:
        model, hidden = self.base.model, self.base.model.hidden_size
        for kind in dict.fromkeys(kind for block in model.blocks for kind in block.kinds):
            options = options_of(model, kind)
            heads, size = getattr(options, "heads", None), getattr(options, "head_dim", None)
            if not heads or not size or kind.variant is not None:
                continue
            key, groups = f"model.{kind.name}", getattr(options, "kv_heads", None)
            if size % UNIT:
                counts = [each for each in range(1, heads * 2) if hidden % each == 0 and (hidden // each) % UNIT == 0]
                near = sorted(counts, key=lambda each: abs(each - heads))[:3]
                changes = [{f"{key}.heads": each, f"{key}.head_dim": hidden // each} for each in near]
                if groups == heads:
                    changes = [{**each, f"{key}.kv_heads": each[f"{key}.heads"]} for each in changes]
                text = f"the size of a head must be a multiple of {UNIT} (best 128): products inside attention have it"
                yield self.finding("head-size", f"{key}.head_dim", size, text, changes)
            batch = self.choice.micro_batch * heads
            if batch % self.choice.tensor:
                text = "micro-batch times heads must be a multiple of the tensor parallel size"
                yield LintFinding("heads-over-ranks", f"{key}.heads", heads, text, {})

    def widths(self) -> Iterator[LintFinding]:
        """Hidden sizes: of the model, and of feed-forward networks, whose 8/3 h is seldom aligned."""
        model, tensor = self.base.model, self.choice.tensor
        hidden = model.hidden_size
        if hidden % (UNIT * tensor):
            text = f"hidden_size must be a multiple of {UNIT} times the tensor parallel size = {UNIT * tensor}"
            yield LintFinding("hidden-alignment", "model.hidden_size", hidden, text, {})
        for kind in dict.fromkeys(kind for block in model.blocks for kind in block.kinds):
            width = getattr(options_of(model, kind), "hidden_size", None)
            if not isinstance(width, int) or kind.variant is not None:
                continue
            unit, key = UNIT * tensor, f"model.{kind.name}.hidden_size"
            near = [width // unit * unit + step * unit for step in range(-4, 6)]
            values = [{key: each} for each in near if each > 0 and each != width and abs(each / width - 1) < 4 * SAME]
            if width % unit:
                text = f"a rank's part of it must be a multiple of {UNIT}: {width} / {tensor} is not"
                yield self.finding("ffn-alignment", key, width, text, values)
            else:
                better, gain, change = self.best(values)
                if gain + change > 0.01:  # more than what a smaller network saves by itself
                    text = "tiles of its products leave units of the device idle in the last wave"
                    yield LintFinding("wave-quantisation", key, width, text, better, gain, change)

    def layers(self) -> Iterator[LintFinding]:
        blocks, stages = len(self.base.model.blocks), self.choice.pipeline
        if stages > 1 and blocks % stages:
            text = f"{blocks} blocks do not divide over {stages} stages: the longest stage sets the pace"
            yield LintFinding("stages-even", "model.layers", blocks, text, {})

    def batch(self) -> Iterator[LintFinding]:
        tokens = self.choice.micro_batch * self.base.training.sequence_length
        if tokens % UNIT:
            text = f"tokens of a micro-batch ({tokens}) must be a multiple of {UNIT}: rows of every product"
            yield LintFinding(
                "token-alignment", "training.sequence_length", self.base.training.sequence_length, text, {}
            )

    def tensor(self) -> Iterator[LintFinding]:
        """A smaller tensor parallel size that fits and is faster."""
        if self.choice.tensor == 1:
            return
        faster = [
            plan
            for plan in self.question.answers().plans
            if plan.choice.grid < self.choice.tensor
            and plan.choice.columns == 1
            and plan.step.seconds < self.plan.step.seconds
        ]
        if faster:
            gain = 1 - faster[0].step.seconds / self.plan.step.seconds
            own, other = self.choice, faster[0].choice
            better = {
                f"parallel.{name}": getattr(other, name)
                for name in AXES
                if name == "pipeline" or getattr(other, name) != getattr(own, name)
            }
            better["zero.stage"] = other.zero
            text = "cutting matrices makes their products small and adds sums: cut as little as memory allows"
            yield LintFinding("tensor-small", "parallel.tensor", self.choice.tensor, text, better, gain)
