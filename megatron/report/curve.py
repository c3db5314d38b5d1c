"""The loss curve and the closing summary of a run, from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron.config.words import counted

from .console import duration, short_number
from .figures import save_lines
from .jsonl import read_lines, sound_metrics
from .plot import Points, draw

FEW = 25  # a running mean extends over 1/25 of a curve to each side


@dataclass
class History:
    """The records of a run: training lines, and the (step, loss) points of each validation set. `abandoned` has the
    training losses of steps that the run repeated later, a list for each rollback."""

    training: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    abandoned: list[Points] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> History:
        """Read a metrics.jsonl.

        Raises:
            FileNotFoundError: there is none.
        """
        history = cls()
        for record in read_lines(path, sound_metrics):
            if "loss" in record:
                history.training.append(record)
            for name, values in record.get("validation", {}).items():
                if values["loss"] is not None:
                    history.validation.setdefault(name, []).append((record["step"], values["loss"]))
        superseded = Path(path).with_suffix(".superseded.jsonl")
        history.abandoned = list(branches(read_lines(superseded, sound_metrics))) if superseded.exists() else []
        return history

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """The training loss and the validation losses by name, as points."""
        training = [(record["step"], record["loss"]) for record in self.training if record["loss"] is not None]
        named = {
            "validation" if name == "validation" else f"validation: {name}": points
            for name, points in self.validation.items()
        }
        return {"training": training, **named}


def branches(records: Iterable[Mapping[str, Any]]) -> Iterator[Points]:
    """Losses of repeated steps, as (step, loss). Another branch begins where the steps start again."""
    branch: list[tuple[float, float]] = []
    for record in records:
        loss = record.get("loss")
        if loss is None:
            continue
        if branch and record["step"] <= branch[-1][0]:
            yield branch
            branch = []
        branch.append((record["step"], loss))
    if branch:
        yield branch


def save_loss_curve(history: History, path: str | Path, title: str) -> None:
    """Draw loss.png. Abandoned steps are grey."""
    curves = history.curves()
    marked = [name for name in curves if name != "training"]
    faint, named = smoothed({"training": curves.pop("training")})
    save_lines(
        path,
        {**named, **curves},
        title=title,
        x="step",
        y="loss (nats per token)",
        marked=marked,
        faint=faint,
        grey=history.abandoned,
    )


def smoothed(curves: dict[str, Points]) -> tuple[dict[str, Points], dict[str, Points]]:
    """(curves as they are, curves to draw over them: running means with the number of points in their names).

    A mean takes the same number of points before and after, fewer towards the ends, so that a straight line stays
    unchanged. A curve of few points has no mean and is returned as it is in the second dictionary.
    """
    raw, means = {}, {}
    for name, points in curves.items():
        half = len(points) // FEW
        if half == 0:
            means[name] = points
            continue
        raw[name] = points
        sums = [0.0, *accumulate(y for _, y in points)]
        reach = [min(half, index, len(points) - 1 - index) for index in range(len(points))]
        means[f"{name} (mean of {2 * half + 1})"] = [
            (x, (sums[index + each + 1] - sums[index - each]) / (2 * each + 1))
            for index, ((x, _), each) in enumerate(zip(points, reach))
        ]
    return raw, means


def terminal_loss_curve(history: History, *, width: int = 72, height: int = 14) -> str:
    return draw(history.curves(), width=width, height=height, title="loss (nats per token) by step")


def summary(history: History, *, seconds: float, reason: str) -> str:
    """The closing summary: losses and speed.

    Args:
        seconds: wall time of this process's loop.
    """
    if not history.training:
        return f"{reason} after {duration(seconds)}: no step was logged"
    first, last = history.training[0], history.training[-1]
    done = f"{counted(last['step'] + 1, 'step')}, {short_number(last['tokens'])} tokens"
    lines = [f"{reason} after {duration(seconds)}: {done}"]
    if first["loss"] is not None and last["loss"] is not None:
        lines.append(
            f"training loss    {first['loss']:.4f} (step {first['step']}) -> {last['loss']:.4f} (step {last['step']})"
        )
    for name, points in history.validation.items():
        best, which = min(points, key=lambda point: point[1]), "" if name == "validation" else f"{name}, "
        lines.append(
            f"validation loss  {points[-1][1]:.4f} ({which}after {counted(points[-1][0], 'step')}, "
            f"best {best[1]:.4f} after {best[0]})"
        )
    rates = sorted(record["tokens_per_second"] for record in history.training if record.get("tokens_per_second"))
    if rates:
        lines.append(f"median speed     {short_number(rates[len(rates) // 2])} tokens/s")
    return "\n".join(lines)
