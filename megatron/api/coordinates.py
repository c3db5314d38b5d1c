"""A coordinate check: how activations change with the width or depth of a model, in the first steps of training.

With a right parametrization each step moves every coordinate of every layer equally at all sizes. Otherwise large
models need another learning rate (Yang et al. 2022, arXiv 2203.03466, appendix D.1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config import Config, ConfigError, Problem, load
from megatron.config.pattern import BlockPattern
from megatron.config.problems import aligned

if TYPE_CHECKING:
    import torch

# Options of layers that count in widths. The first row grows where heads grow in number, the second where they grow in
# size (`model.parametrization.base_head_dim`).
NUMBERS = ("heads", "kv_heads", "key_heads")
SIZES = ("head_dim", "nope_dim", "rope_dim", "value_dim", "key_dim")
WIDTHS = ("hidden_size", "shared_size", "inner_size", "query_rank", "kv_rank")
# A change that grows with the root of the size has slope 0.5: a parametrization omits it.
STEEP = 0.25


@dataclass(frozen=True)
class CoordinateCheck:
    """Activations of one place in one model after a number of steps, mean over seeds.

    Attributes:
        size: the width, or the number of blocks.
        place: embedding, a kind of layer (mean over its layers), stream (after the last block) or logits.
        step: updates done.
        value: mean absolute activation.
        change: mean absolute difference to the activation before the first step. Of logits: to the initial head's,
            on the same stream. Its own part falls with the root of the width where a parametrization is right.
    """

    size: int
    place: str
    step: int
    value: float
    change: float


@dataclass(frozen=True)
class Slope:
    """The slope of log(change) over log(size) at one place after the last step, by least squares.

    Attributes:
        end: the slope between the two largest sizes.
    """

    place: str
    slope: float
    end: float

    @property
    def verdict(self) -> str:
        if not math.isfinite(self.slope):
            return "diverges"
        if self.slope > STEEP:
            return "grows"
        # Random parts of a change fall with the root of the size and die out: at large sizes the right part is left.
        return "shrinks" if max(self.slope, self.end) < -STEEP else "flat"


def check(
    files: Sequence[str], overrides: Sequence[str], axis: str, sizes: Sequence[int], *, steps: int = 4, seeds: int = 2
) -> list[CoordinateCheck]:
    """Train the models of these sizes a few steps in this process, at a constant rate, and measure their activations.

    Every model reads the batches of the run's first steps. Activations are measured on the first batch.

    Args:
        files, overrides: as on the command line.
        axis: "width" or "depth".
        sizes: values of `model.hidden_size`, or numbers of blocks.

    Raises:
        ConfigError: a size has no model: a width that was given does not divide, or the pattern has no such depth.
    """
    configs = [[member(files, overrides, axis, size, seed) for seed in range(seeds)] for size in sizes]
    found = []
    for size, members in zip(sizes, configs):
        runs = [_train(each, steps) for each in members]
        for place, step in runs[0]:
            values, changes = zip(*(run[place, step] for run in runs))
            found.append(CoordinateCheck(size, place, step, sum(values) / seeds, sum(changes) / seeds))
    return found


def member(files: Sequence[str], overrides: Sequence[str], axis: str, size: int, seed: int = 0) -> Config:
    """The configuration of the model of this width or depth.

    Raises:
        ConfigError: there is none.
    """
    base = load(files, overrides, ranks=1).config
    changes = [f"training.seed={base.training.seed + seed}"]
    if axis == "width":
        changes += [f"model.hidden_size={size}", *_wider(files, overrides, size / base.model.hidden_size)]
    else:
        changes.append(f"model.layers={_deeper(base.model.blocks, size)}")
    return load(files, [*overrides, *changes], ranks=1).config


def _wider(files: Sequence[str], overrides: Sequence[str], factor: float) -> Iterator[str]:
    """The widths inside layers that the user gave, times a factor."""
    resolved = load(files, overrides, ranks=1)
    model = resolved.config.model
    larger = model.parametrization.base_head_dim is not None
    names = (*WIDTHS, *(SIZES if larger else NUMBERS))
    sections: dict[str, Mapping[str, Any]] = {f"model.variants.{name}": own for name, own in model.variants.items()}
    kinds = dict.fromkeys(kind.name for block in model.blocks for kind in block.kinds)
    sections |= {f"model.{kind}": getattr(model, kind).model_dump() for kind in kinds}
    for section, values in sections.items():
        for name in names:
            key, value = f"{section}.{name}", values.get(name)
            origin = resolved.origins.get(key)
            if value is None or origin is None or not origin.given:
                continue
            if value * factor != int(value * factor) or value * factor < 1:
                rule = f"{key} must grow with the width, and {value} times {factor:g} is no whole number"
                raise ConfigError([Problem(key, rule, "choose other widths, or another size in the file", value)])
            yield f"{key}={int(value * factor)}"


def _deeper(blocks: Sequence[BlockPattern], depth: int) -> str:
    """The pattern's shortest repeated part, repeated to `depth` blocks."""
    texts = list(map(str, blocks))
    part = next(n for n in range(1, len(texts) + 1) if texts == texts[:n] * (len(texts) // n))
    if depth % part:
        rule = f"a depth must be a multiple of the {part} blocks that the pattern repeats, and {depth} is not"
        raise ConfigError([Problem("model.layers", rule, f"use {part}, {2 * part}, {4 * part}", "/".join(texts))])
    return f"({' '.join(texts[:part])}) x{depth // part}"


def _train(config: Config, steps: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(mean absolute activation, mean absolute change) of every place after every number of steps."""
    from megatron.api import batches
    from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
    from megatron.parallel.layers.parameters import logical_of

    from .analysis import OpenModel

    opened = OpenModel.initial(config, "cpu", "fp32")
    parameters = list(dict.fromkeys(opened.model.parameters()))
    optimizer = build_optimizer(config, parameters)
    set_learning_rate(optimizer, config.optimizer.lr)
    read = list(batches(config, 0, max(steps, 1)))
    head = copy.deepcopy(opened.model.head)
    begun: dict[str, list[torch.Tensor]] = {}
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for step in range(steps + 1):
        now = _activations(opened, read[0])
        begun = {**(begun or now), "logits": [_logits(opened, head, read[0])]}
        for place, tensors in now.items():
            sizes = [each.abs().mean().item() for each in tensors]
            moved = [(each - first).abs().mean().item() for each, first in zip(tensors, begun[place])]
            found[place, step] = sum(sizes) / len(sizes), sum(moved) / len(moved)
        if step < steps:
            gradients = opened.forward(read[step], gradients=True).gradients
            for parameter in parameters:
                parameter.grad = gradients[logical_of(parameter).name].view_as(parameter)
            optimizer.step()
    return found


def _activations(opened: Any, batch: Any) -> dict[str, list[torch.Tensor]]:
    """The activations of every place on a batch. A kind has the activations of each of its layers."""
    blocks = opened.model.plan.blocks
    names = {"embedding": ["embedding"]}
    for index, block in enumerate(blocks):
        for kind in block.layers:
            names.setdefault(kind.name, []).append(f"layers.{index}.{kind.name}")
    names["stream"] = [f"layers.{len(blocks) - 1}"]
    kept = opened.forward(batch, keep=[name for own in names.values() for name in own]).activations
    found = {place: [kept[name].float() for name in own] for place, own in names.items()}
    found["logits"] = [_logits(opened, opened.model.head, batch)]
    return found


def _logits(opened: Any, head: Any, batch: Any) -> torch.Tensor:
    """The logits that a head makes of the model's stream."""
    import torch

    with torch.no_grad():
        return head.logits(opened.model.stream(batch.inputs.flatten(0, -2)))


def slopes(found: Sequence[CoordinateCheck]) -> list[Slope]:
    """Slope of each place's change over the size, after the last step."""
    last = max(each.step for each in found)
    result = []
    for place in dict.fromkeys(each.place for each in found):
        points = [(each.size, each.change) for each in found if each.place == place and each.step == last]
        result.append(Slope(place, _slope(points), _slope(sorted(points)[-2:])))
    return result


def _slope(points: Sequence[tuple[float, float]]) -> float:
    if len(points) < 2 or not all(math.isfinite(y) and y > 0 for _, y in points):
        return math.nan
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)


def table(found: Sequence[CoordinateCheck], axis: str) -> str:
    """Changes after the last step by place and size, with their slopes and the verdict."""
    last, sizes = max(each.step for each in found), list(dict.fromkeys(each.size for each in found))
    rows = [("place", *(f"{axis} {size}" for size in sizes), "slope", "")]
    for each in slopes(found):
        changes = [f"{one.change:.3g}" for one in found if one.place == each.place and one.step == last]
        rows.append((each.place, *changes, f"{each.slope:+.2f}", each.verdict))
    lines = [f"mean |activation after {last} steps - activation before|", *aligned(rows, left=len(rows[0]))]
    return "\n".join([*lines, verdict(found, axis)])


def verdict(found: Sequence[CoordinateCheck], axis: str) -> str:
    """One sentence on all places."""
    steep = [f"{each.place} {each.verdict}" for each in slopes(found) if each.verdict != "flat"]
    if not steep:
        return f"flat: with the {axis}, no slope is above {STEEP:g}, or below -{STEEP:g} up to the largest"
    return f"not flat with the {axis}: {', '.join(steep)}"


def picture(found: Sequence[CoordinateCheck], axis: str, path: str) -> None:
    """Write a picture: for each place, the change of its activations over the size, a line per step."""
    from megatron.report.figures import new_figure, write_figure

    places, steps = list(dict.fromkeys(each.place for each in found)), sorted({each.step for each in found} - {0})
    figure = new_figure(3.2 * len(places), 3.4)
    for axes, each in zip(figure.subplots(1, len(places), squeeze=False)[0], slopes(found)):
        for number, step in enumerate(steps):
            points = [(one.size, one.change) for one in found if one.place == each.place and one.step == step]
            shade = 1.0 - 0.8 * (len(steps) - 1 - number) / len(steps)
            axes.plot(*zip(*points), marker="o", markersize=3, color="tab:blue", alpha=shade, label=f"step {step}")
        axes.set(xscale="log", yscale="log", xlabel=axis, title=f"{each.place}: slope {each.slope:+.2f}")
        axes.set_xticks(sorted({one.size for one in found}), list(map(str, sorted({one.size for one in found}))))
        axes.minorticks_off()
    figure.axes[0].set_ylabel("mean |change of the activation|")
    figure.axes[0].legend(fontsize="small")
    write_figure(figure, path)
