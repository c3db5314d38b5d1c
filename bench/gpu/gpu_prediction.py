"""Predict tokens/s and MFU on H100s from counted kernels, bytes and FLOPs: docs/gpu_prediction.md, before any run.

    python -m bench gpu-prediction                     # the tables
    python -m bench gpu-prediction --page docs/gpu_prediction.md

The time of a step is a sum: matrix products, attention and scans, memory traffic, the loss, the optimizer, and messages
that no computation hides. The host's time replaces it where launching all kernels takes longer. FLOPs, parameters,
matrices and kept activations are the layers' own counts. `make gpu-host` counts the kernels. `RATES` has the rates,
with their sources.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from bench.runner import ROOT, Result, grid
from megatron.config import Config, load
from megatron.parallel.layout.layout import Layout
from megatron.plan.devices import Cluster, Device, cluster
from megatron.plan.prediction import choice_of
from megatron.plan.shapes import Shapes
from megatron.plan.step import BACKWARD_ATTENTION, OVERLAP, collective, groups, product_time
from tests.stand_ins.gpu.cases import further_kernels, kernels_of_layers

GPUS = (1, 8, 64)
RATES = {  # shares of the data sheet's figures
    "matrix": (0.70, "products of a block of pythia-1.4b at 675 of 989 TFLOP/s, an estimate"),
    "attention": (0.386, "cuDNN's attention in pythia-1.4b: 5.77 TFLOP in the measured 15.1 ms"),
    "scan": (0.20, "chunks of recurrent mixers in fla's kernels, a guess"),
    "memory": (0.845, "51 GB of elementwise work in 18 ms, an estimate"),
}
GAP = 1.5e-6  # seconds between two kernels of a stream, a guess
LAUNCH = 26.7e-6  # seconds of the host for a kernel: mamba2-370m was bound by it, 603.4 ms for 22,600 kernels
TRAFFIC = 4  # times that a kept byte of activations is moved: written, read, and its gradient written and read
FIRST, LATER = 6, 10  # bytes of a parameter when its 16-bit gradient is copied or added to the fp32 sum
UPDATE, NORM = 30, 4  # bytes of a parameter in AdamW with its 16-bit weights, and where ranks have summed gradients
SLOWEST = 0.02  # of a step, that ranks wait for the slowest of them, a guess
PAGE_BEGIN, PAGE_END = "<!-- gpu-prediction -->", "<!-- end -->"
MOE = [
    "model.layers=(attention/moe) x12", "model.hidden_size=768", "model.attention={heads: 12, kv_heads: 12}",
    "model.moe.hidden_size=2048",
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, its file below configs/, and its step.

    Attributes:
        layer: whose kernels were counted, see `tests/stand_ins/gpu/cases.py`.
        least: GPUs whose memory holds it.
    """

    name: str
    file: str
    micro_batch: int
    accumulation: int
    layer: str
    overrides: tuple[str, ...] = ()
    least: int = 1
    scans: bool = False


SMALL = "training.loss_chunk=1024"
SHAPES = (
    Shape("pythia-160m", "pythia/160m", 16, 1, "Pythia", ("training.loss_chunk=8192",)),
    Shape("pythia-410m", "pythia/410m", 8, 2, "Pythia", (SMALL,)),
    Shape("pythia-1.4b", "pythia/1.4b", 4, 4, "Pythia", (SMALL,)),
    Shape("Llama 3.2 1B", "llama/llama3.2_1b", 4, 4, "Llama", ("training.loss_chunk=8192",)),
    Shape("Llama 3 8B", "llama/llama3_8b", 1, 4, "Llama", ("training.loss_chunk=8192",), least=8),
    Shape("8 experts of 2048, top 2", "mixtral/8x7b", 8, 1, "experts", (SMALL, *MOE)),
    Shape("mamba2-370m", "mamba2/370m", 4, 1, "Mamba-2", (SMALL,), scans=True),
    Shape("rwkv7-0.4b", "rwkv7/0.4b", 4, 1, "RWKV-7", (SMALL,), scans=True),
)


def configured(shape: Shape, ranks: int) -> Config:
    size = shape.micro_batch * shape.accumulation * ranks
    own = ["precision=bf16", "training.sequence_length=2048", f"training.micro_batch_size={shape.micro_batch}"]
    own += [f"training.global_batch_size={size}", "data.train=null", "data.synthetic=copy", "checkpoint.every=null"]
    own += ["zero.stage=1", "parallel={tensor: 1, pipeline: 1, context: 1}", *shape.overrides]
    return load([ROOT / "configs" / f"{shape.file}.yml"], own, ranks=ranks, check_inputs=False, here=False).config


def seconds(
    shape: Shape, config: Config, ranks: int, at: Cluster, attention: float = RATES["attention"][0], more: int = 0
) -> dict[str, float]:
    """Seconds of a step by what they are spent on.

    Args:
        attention: share of the peak that attention reaches.
        more: bytes of a parameter in a step, in addition to the present optimizer's.
    """
    shapes, choice, device = Shapes(config, ranks), choice_of(config), at.device
    tokens, passes = shape.micro_batch * 2048, shape.accumulation
    peak, memory = device.peak("bf16"), device.bandwidth * 1e9 * RATES["memory"][0]
    best = device.model_copy(
        update={
            "efficiency": device.efficiency.model_copy(
                update={"matrix": RATES["matrix"][0], "memory": RATES["memory"][0]}
            ),
            "launch": GAP * 1e6,
        }
    )
    found = dict.fromkeys(("products", "attention and scans", "memory", "loss"), 0.0)
    layers = [shapes.layer(place, choice) for place in range(shapes.places)]
    for layer in layers[:-1]:
        found["products"] += sum(_products(best, peak, tokens, *_sides(each)) for each in layer.matrices)
        rate = peak * (attention if layer.attends else RATES["scan"][0])
        work = layer.other * tokens * (1 + BACKWARD_ATTENTION) * (0.5 if layer.attends else 1.0)
        found["attention and scans"] += work / rate
        found["memory"] += TRAFFIC * tokens * layer.saved["none"] / memory
    head, chunk = layers[-1].matrices[0], config.training.tokens_of_loss(config.model.vocab_size, True) or tokens
    chunks = ceil(tokens / chunk)
    found["loss"] = chunks * _products(best, peak, min(chunk, tokens), *_sides(head))
    found["loss"] += (8 * tokens * head.rows + 8 * chunks * head.rows * head.columns) / memory
    found = {name: each * passes for name, each in found.items()}
    weights = sum(layer.own.total for layer in layers)
    sums = weights * (FIRST + LATER * (passes - 1))
    found["optimizer"] = (sums + weights / ranks * (more + UPDATE + NORM * (ranks > 1))) / memory
    once, each_pass, each_chunk = further_kernels()
    each_pass += kernels_of_layers()[shape.layer] * (shapes.places - 2) + each_chunk * chunks
    kernels = once + passes * each_pass
    found["gaps"] = kernels * GAP
    found |= _messages(config, ranks, weights, sum(found.values()) / passes, at)
    device_time = sum(found.values())
    if ranks > 1:
        found["slowest rank"] = SLOWEST * device_time
    found["host"] = max(0.0, kernels * LAUNCH - device_time)
    return found


def _sides(matrix: Any) -> tuple[int, int, int, float]:
    return matrix.rows, matrix.columns, matrix.count, matrix.share


def _products(device: Device, peak: float, tokens: int, n: int, k: int, count: int, share: float) -> float:
    """Forward, and the gradients of what it read and of the weight."""
    m = max(1.0, tokens * share)
    ways = ((m, n, k), (m, k, n), (n, k, max(1, round(m))))
    return sum(product_time(device, peak, 2, rows, columns, inner, count) for rows, columns, inner in ways)


def _messages(config: Config, ranks: int, weights: int, pass_time: float, at: Cluster) -> dict[str, float]:
    """Seconds of messages that no computation hides. The reduce-scatter in fp32 runs under the last backward pass, two
    thirds of a micro-batch. The gather in bf16 runs under the next forward pass."""
    if ranks == 1:
        return {}
    group = groups(Layout.of(config, ranks), at.per_host)["replicas"]
    bucket = 40_000_000
    scatter = collective(at, group, "reduce_scatter", 4 * weights, ceil(weights / bucket))
    gather = collective(at, group, "all_gather", 2 * weights, ceil(weights / bucket))
    last = 4 * min(bucket, weights) / (4 * weights) * scatter  # the last bucket has nothing to hide under
    first = 2 * config.model.hidden_size * (config.model.vocab_size or 0) / weights * gather
    hidden = OVERLAP * pass_time
    return {"messages": max(last, scatter - hidden * 2 / 3) + max(min(first, gather), gather - hidden / 3)}


def checked() -> list[list[str]]:
    """The same sums for kernels of two steps that were measured. The optimizer then moved 8 bytes more per parameter.
    Pythia-1.4b had torch's FlashAttention, 25 ms in place of cuDNN's 15.1."""
    rows, old = [["shape, one micro-batch", "kernels measured, ms", "formulas, ms"]], 15.1 / 25 * RATES["attention"][0]
    for name, attention, measured in (("pythia-160m", RATES["attention"][0], 75.2), ("pythia-1.4b", old, 161.1)):
        shape = replace(next(each for each in SHAPES if each.name == name), accumulation=1)
        spent = seconds(shape, configured(shape, 1), 1, cluster(1, "h100"), attention, 8)
        rows.append([name, f"{measured}", f"{1e3 * (sum(spent.values()) - spent['host']):.1f}"])
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=Path, help="write the tables into this page")


def measure(given: argparse.Namespace) -> Result:
    from megatron.model.costs.describe import totals

    rows, parts, document = [["shape", "micro-batch", *_heads()]], [["shape", *_parts()]], []
    for shape in SHAPES:
        cells = []
        for ranks in GPUS:
            if ranks < shape.least:
                cells += ["", ""]
                continue
            config, at = configured(shape, ranks), cluster(ranks, "h100")
            spent = seconds(shape, config, ranks, at)
            rate = shape.micro_batch * shape.accumulation * 2048 / sum(spent.values())
            mfu = rate * totals(config).training_flops / at.device.peak("bf16")
            cells += [f"{rate:,.0f}", f"{mfu:.1%}"]
            document.append({"shape": shape.name, "gpus": ranks, "tokens": rate, "mfu": mfu, "seconds": spent})
            if ranks == shape.least:
                parts.append([shape.name, *(f"{1e3 * spent.get(name, 0.0):.1f}" for name in _parts())])
        rows.append([shape.name, f"{shape.accumulation} x {shape.micro_batch}", *cells])
    text = f"{grid(rows)}\n\nMilliseconds of a step on the fewest GPUs:\n\n{grid(parts)}\n\n"
    text += f"Steps that were measured before:\n\n{grid(checked())}\n\nCounted kernels:\n\n{grid(_counted())}"
    if given.page:
        page = given.page.read_text()
        begin, end = page.index(PAGE_BEGIN) + len(PAGE_BEGIN), page.index(PAGE_END)
        given.page.write_text(f"{page[:begin]}\n{text}\n{page[end:]}")
    return Result(document, text)


def _counted() -> list[list[str]]:
    layers, further = kernels_of_layers(), further_kernels()
    names = [f"layer of {name}" for name in layers]
    return [[*names, "step", "micro-batch", "chunk of the loss"], [f"{each}" for each in (*layers.values(), *further)]]


def _heads() -> list[str]:
    return [head for ranks in GPUS for head in (f"{ranks} GPU{'s' * (ranks > 1)}: tokens/s each", "MFU")]


def _parts() -> list[str]:
    names = ["products", "attention and scans", "memory", "loss", "optimizer", "gaps", "messages", "slowest rank"]
    return [*names, "host"]
