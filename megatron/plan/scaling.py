"""Plans over numbers of devices, plans for a budget, and the cost of failures."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import expm1, inf
from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError
from megatron.config.problems import divisors
from megatron.config.source.layers import ConfigSource
from megatron.model.costs.describe import totals
from megatron.report.figures import new_figure, write_figure
from megatron.report.ledger import best_interval

from .search import Plan, Question


@dataclass(frozen=True)
class ScalingPoint:
    """The fastest layout on a number of devices."""

    devices: int
    batch: int
    plan: Plan
    efficiency: float  # tokens per second of a device, as a share of those on the fewest devices

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "global_batch_size": self.batch,
            "efficiency": self.efficiency,
            **self.plan.to_json(),
        }


def curve(question: Question, first: int, last: int, *, weak: bool) -> list[ScalingPoint]:
    """The fastest layouts on first, 2 first, ... devices up to `last`. Numbers on which no layout fits are omitted.

    Args:
        weak: the batch grows in proportion to the devices. Otherwise it is constant.
    """
    found: list[ScalingPoint] = []
    devices, batch = first, question.base.training.global_batch_size
    while devices <= last:
        own = batch * devices // first if weak else batch
        source = ConfigSource({"training": {"global_batch_size": own, "accumulation": None}})
        try:
            asked = Question.from_sources([*question.sources, source], question.at.sized(devices))
            plans = asked.answers().plans
        except ConfigError:
            plans = []
        if plans:
            each = plans[0].tokens_per_second / devices
            start = found[0].plan.tokens_per_second / found[0].devices if found else each
            found.append(ScalingPoint(devices, own, plans[0], each / start))
        devices *= 2
    return found


def draw(strong: list[ScalingPoint], weak: list[ScalingPoint], path: Path, title: str) -> None:
    """Tokens per second against devices, with the line of perfect scaling."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for points, label in ((strong, "the same batch"), (weak, "the batch grows")):
        if points:
            axes.plot([p.devices for p in points], [p.plan.tokens_per_second for p in points], "o-", label=label)
    points = strong or weak
    per = points[0].plan.tokens_per_second / points[0].devices
    axes.plot([p.devices for p in points], [per * p.devices for p in points], "--", color="grey", label="perfect")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens per second", title=title)
    axes.set_xticks([p.devices for p in points], [str(p.devices) for p in points], minor=False)
    axes.minorticks_off()
    axes.legend()
    write_figure(figure, path)


@dataclass(frozen=True)
class Failures:
    """Cost of failures (Daly 2006, equation 20, and Young 1974 for the interval)."""

    interval: float  # seconds between checkpoints that lose least
    factor: float  # wall time with failures over time without


def failures(devices: int, per_device_day: float, save: float, restart: float) -> Failures:
    """The best interval of checkpoints and the time that failures cost.

    Args:
        per_device_day: failures of a device in a day. Llama 3 had 419 in 54 days on 16,384, about 4.7e-4.
        save: seconds that a checkpoint stops the run.
        restart: seconds from a failure to the first new step.
    """
    if per_device_day <= 0:
        return Failures(inf, 1.0)
    mean = 86400 / (per_device_day * devices)
    interval = best_interval(save, mean)
    whole = mean * 2.718281828459045 ** (restart / mean) * expm1((interval + save) / mean)
    return Failures(interval, whole / interval)


@dataclass(frozen=True)
class Proposal:
    """A size of the model for a budget."""

    layers: int  # layers, hidden: blocks and width
    hidden: int
    parameters: int
    tokens: float  # that it is trained on
    hours: float  # of devices
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        own = {"layers": self.layers, "hidden_size": self.hidden, "parameters": self.parameters}
        return {**own, "tokens": self.tokens, "device_hours": self.hours, **self.plan.to_json()}


def proposals(question: Question, hours: float, ratio: float) -> list[Proposal]:
    """Sizes of the question's architecture whose training on `ratio` tokens per parameter takes at most `hours` device
    hours, the largest first. Widths grow in steps of 512, with about width / 128 blocks (Levine et al. 2020 find that
    depth grows more slowly. GPT-3's shapes have this ratio near 13B)."""
    found = []
    for layers, hidden in shapes(question.base):
        values = scaled(question.base, layers, hidden)
        if values is None:
            return []
        try:
            asked = Question.from_sources([*question.sources, ConfigSource(values)], question.at)
        except ConfigError:
            continue
        count = totals(asked.base).parameters
        least = ratio * count * asked.flops / (asked.at.device.peak(asked.base.precision.compute) * 3600)
        if least > hours:
            break
        plans = asked.answers().plans
        if not plans:
            break
        need = ratio * count / plans[0].tokens_per_second / 3600 * asked.at.devices
        if need > hours:
            break
        found.append(Proposal(layers, hidden, count, ratio * count, need, plans[0]))
    return found[::-1][:5]


def shapes(config: Config) -> Iterator[tuple[int, int]]:
    """(blocks, width) of growing sizes: blocks are multiples of the pattern's shortest period."""
    blocks = config.model.blocks
    period = next(each for each in divisors(len(blocks)) if blocks == blocks[:each] * (len(blocks) // each))
    for hidden in range(512, 20480, 512):
        yield max(1, round(hidden / 128 / period)) * period, hidden


def scaled(config: Config, layers: int, hidden: int) -> dict[str, Any] | None:
    """The configuration's values with another size: heads of the same size, feed-forward networks of the same ratio.
    None for stacks other than softmax attention with dense networks, whose sizes follow other rules."""
    model = config.model
    kinds = {kind.name for block in model.blocks for kind in block.kinds}
    if not kinds <= {"attention", "mlp"} or any(kind.variant for block in model.blocks for kind in block.kinds):
        return None
    size, ratio = model.attention.head_dim, model.mlp.hidden_size / model.hidden_size
    heads = max(1, hidden // size)
    share = max(1, (model.attention.heads or 1) // (model.attention.kv_heads or 1))
    groups = max(each for each in divisors(heads) if each <= max(1, heads // share))
    attention = {"heads": heads, "kv_heads": groups, "head_dim": size}
    own = {"layers": f"({model.blocks[0]}) x{layers}", "hidden_size": hidden, "attention": attention}
    return {"model": {**own, "mlp": {"hidden_size": round(ratio * hidden / 256) * 256}}}
