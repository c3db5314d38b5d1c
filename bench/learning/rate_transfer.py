"""Check whether the best learning rate stays the same over widths, standard and muP.

    python -m bench rate-transfer --widths 32,64,128,256 -o docs/rate_transfer.png --json rates.json

Models of two blocks learn the bytes of this repository's documentation for a few hundred steps, in one process, at a
constant rate after a short warmup. The loss is the mean over the last steps, of the same batches for every model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.runner import ROOT, Result, grid
from megatron.api import batches
from megatron.api.analysis import OpenModel
from megatron.config import Config, resolve
from megatron.data.token_file import TokenFileWriter
from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from megatron.parallel.layers.parameters import logical_of
from megatron.report.figures import write_figure

Losses = dict[str, dict[int, dict[float, float]]]  # by parametrization, width and rate


def corpus(folder: Path) -> str:
    """The documentation as bytes, one document per page."""
    with TokenFileWriter(folder / "docs", np.uint16) as writer:
        for page in sorted((ROOT / "docs").glob("*.md")):
            writer.append(np.frombuffer(page.read_bytes(), np.uint8))
    return str(folder / "docs")


def config_of(data: str, type: str, width: int, base: int, rate: float, steps: int, seed: int) -> Config:
    """Heads of 16 channels grow in number. The head starts at 0, so all widths begin with the same loss."""
    parametrization = {} if type == "standard" else {"type": type, "base_width": base}
    return resolve({
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": width,
            "vocab_size": 256,
            "norm": {"type": "rmsnorm"},
            "attention": {"heads": width // 16},
            "embedding": {"multiplier": 10.0},
            "init": {"std": 0.1, "output": "normal", "head": "zeros"},
            "parametrization": parametrization,
        },
        "training": {"steps": steps, "sequence_length": 64, "micro_batch_size": 4, "seed": seed},
        "optimizer": {"lr": rate, "weight_decay": 0.0},
        "data": {"train": data},
    })


def train(config: Config, warmup: int = 10) -> float:
    """The mean loss over the last fifth of the steps, or infinity where it is no number."""
    opened, steps = OpenModel.initial(config, "cpu", "fp32"), config.training.steps
    parameters = list(dict.fromkeys(opened.model.parameters()))
    optimizer, losses = build_optimizer(config, parameters), []
    for step, batch in enumerate(batches(config, 0, steps)):
        set_learning_rate(optimizer, config.optimizer.lr * min(1.0, (step + 1) / warmup))
        found = opened.forward(batch, gradients=True)
        if not math.isfinite(found.loss):
            return math.inf
        for parameter in parameters:
            parameter.grad = found.gradients[logical_of(parameter).name].view_as(parameter)
        optimizer.step()
        losses.append(found.loss)
    last = losses[-max(steps // 5, 1) :]
    return sum(last) / len(last)


def sweep(widths: list[int], rates: list[float], steps: int, seeds: int) -> Losses:
    found: Losses = {}
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder))
        for type in ("standard", "mup"):
            for width in widths:
                for rate in rates:
                    runs = [
                        train(config_of(data, type, width, widths[0], rate, steps, 1234 + seed))
                        for seed in range(seeds)
                    ]
                    found.setdefault(type, {}).setdefault(width, {})[rate] = sum(runs) / seeds
                losses = found[type][width]
                best = min(losses, key=losses.__getitem__)
                print(f"{type} {width}: best 2^{math.log2(best):g}, loss {losses[best]:.3f}", file=sys.stderr)
    return found


def table(found: Losses) -> str:
    """Losses by rate, and which is the best of each width."""
    lines = []
    for type, by_width in found.items():
        rates = list(next(iter(by_width.values())))
        rows = [[type, *(f"2^{math.log2(rate):g}" for rate in rates)]]
        for width, losses in by_width.items():
            least = min(losses.values())
            cells = [f"**{loss:.3f}**" if loss == least else f"{loss:.3f}" for loss in losses.values()]
            rows.append([f"width {width}", *cells])
        lines += [grid(rows), ""]
    return "\n".join(lines)


def picture(found: Losses, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (type, by_width) in zip(figure.subplots(1, len(found), sharey=True), found.items()):
        for number, (width, losses) in enumerate(by_width.items()):
            color = (0.1, 0.3, 0.6 + 0.3 * number / len(by_width), 0.35 + 0.65 * number / max(len(by_width) - 1, 1))
            axes.plot(list(losses), list(losses.values()), marker="o", markersize=3, color=color, label=f"{width}")
            best = min(losses, key=losses.__getitem__)
            axes.plot([best], [losses[best]], marker="*", markersize=11, color="tab:red")
        axes.set(xscale="log", xlabel="learning rate", title=type)
        axes.set_xticks(list(losses), [f"2^{math.log2(rate):g}" for rate in losses])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("loss, nats per byte")
    figure.axes[0].legend(title="width", fontsize="small")
    write_figure(figure, path)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--rates", default="-8,-7,-6,-5,-4", help="exponents of 2 (write --rates=-9,-8)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--output", help="write a picture (PNG) here")
    parser.add_argument("--json", help="write all losses here")


def measure(given: argparse.Namespace) -> Result:
    widths = [int(each) for each in given.widths.split(",")]
    found = sweep(widths, [2.0 ** float(each) for each in given.rates.split(",")], given.steps, given.seeds)
    if given.json:
        Path(given.json).write_text(json.dumps(found))
    if given.output:
        picture(found, given.output)
    return Result(found, table(found))
