"""Compare the plan and rehearsals with the memory and the step time of one device, such as a GPU.

    python -m bench plan-device --parts planned rehearsed --gpu h100 --json rows.json         # on any machine
    python -m bench plan-device --parts measured --device cuda --json rows.json --markdown rows.md

Each configuration trains on one rank with sequences of 2048 tokens, in a process of its own, so that its memory is its
own. Measured are the most that torch's allocator gave to tensors and took from the device during steps, and the median
of a step. So is the memory of the whole process at their end, with the device's context and libraries. On a CPU the
bytes of all tensors are counted instead. Predictions need no GPU. Rows are written as they are made. A part in the file
is kept if it is of the same --device, or was predicted with the same figures. A measurement that failed is made again.
The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.runner import ROOT, Result, grid, share
from megatron.config import Config, load
from megatron.plan.devices import Cluster, cluster

PARTS = ("planned", "rehearsed", "measured")
WARM_UP, FEWEST, MOST = 3, 5, 30  # steps
FULL = "training.activation_checkpointing.mode=full"
SMALL_MOE = [
    "model.layers=(attention/moe) x12",
    "model.hidden_size=1024",
    "model.attention={heads: 16, kv_heads: 4}",
    "model.moe.hidden_size=2816",
]
TINY = ["training.sequence_length=64", "training.loss_chunk=0", "zero.bucket_size=2000"]


def _case(file: str, micro_batch: int, *overrides: str) -> tuple[str, list[str]]:
    """A file below configs/, and its changes. It has two micro-batches, as a run that accumulates."""
    sizes = [f"training.micro_batch_size={micro_batch}", f"training.global_batch_size={2 * micro_batch}"]
    return file, ["precision=bf16", "training.sequence_length=2048", *sizes, *overrides]


CASES = {
    "pythia-160m": _case("pythia/160m", 16),
    "pythia-160m, fp32, ZeRO 0": _case("pythia/160m", 8, "precision=fp32", "zero.stage=0"),
    "pythia-410m": _case("pythia/410m", 8),
    "pythia-410m, recomputation": _case("pythia/410m", 16, FULL),
    "pythia-410m, ZeRO 3": _case("pythia/410m", 8, "zero.stage=3"),
    "pythia-1b": _case("pythia/1b", 8),
    "pythia-1.4b": _case("pythia/1.4b", 4),
    "pythia-1.4b, recomputation": _case("pythia/1.4b", 8, FULL),
    "llama-1b": _case("llama/llama3.2_1b", 4),
    "llama-1b, recomputation": _case("llama/llama3.2_1b", 8, FULL),
    "mamba2-370m": _case("mamba2/370m", 4),
    "mamba2-370m, recomputation": _case("mamba2/370m", 4, FULL),
    "rwkv7-0.4b": _case("rwkv7/0.4b", 4),
    "small mixtral": _case("mixtral/8x7b", 4, *SMALL_MOE),
    "tiny neox": _case("test/tiny_neox", 2, *TINY, "precision=fp32"),  # the last two are for tests without a GPU
    "tiny mixtral": _case("test/tiny_mixtral", 2, *TINY),
}
DEFAULT = [name for name in CASES if not name.startswith("tiny")]


def configured(name: str, more: list[str]) -> Config:
    """A case, resolved for one rank."""
    file, overrides = CASES[name]
    own = [*overrides, "data.train=null", "data.synthetic=copy", "checkpoint.every=null", *more]
    return load([str(ROOT / "configs" / f"{file}.yml")], own, ranks=1, check_inputs=False, here=False).config


def planned(config: Config, at: Cluster) -> dict[str, Any]:
    """By formulas: bytes of a device by what they are for, and seconds of a step."""
    from megatron.plan.memory import memory
    from megatron.plan.prediction import choice_of
    from megatron.plan.shapes import Shapes
    from megatron.plan.step import StepEstimator

    shapes, choice = Shapes(config, 1), choice_of(config)
    found, step = memory(config, shapes, choice, at), StepEstimator(config, shapes, at).step(config, choice)
    parts = {name: round(size) for name, size in found.parts.items()}
    tensors = sum(size for name, size in parts.items() if name not in ("runtime", "fragments"))
    return {"tensors": tensors, "total": round(found.total), "parts": parts, "seconds": step.seconds}


def rehearsed(config: Config, at: Cluster) -> dict[str, Any]:
    """Bytes of tensors by purpose, and with the allowance, and processor seconds of the rehearsal."""
    from megatron.parallel.layout.layout import Layout
    from megatron.plan.candidate import on_device
    from megatron.rehearsal.command import in_own_process
    from megatron.rehearsal.report import describe_rank

    config = on_device(config, at.device.name != "cpu")
    counts = in_own_process(config, 1, 0)
    found = describe_rank(config, Layout.of(config, 1), 0, counts, at.device)["memory"]
    own = {name: found[name] for name in ("tensors", "total", "parts", "moment")}
    return {**own, "processor_seconds": round(counts.processor, 1)}


def measured(config: Config, device: str, seconds: float) -> dict[str, Any]:
    """Bytes and seconds of this process's own steps, for at most about that number of seconds of steps."""
    import torch

    from megatron.data.batch import StepBatch
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.model.stack import ModelPlan
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.rehearsal.rank import blank_batch, observe

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # DeepSpeed reads them
    begun = time.perf_counter()
    prepare_deepspeed(torch.device(device))
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    generator = torch.Generator().manual_seed(config.training.seed)
    form = ModelPlan(config, Mesh.single(), "meta", values=False).form

    def batch(step: int) -> StepBatch:
        blank = blank_batch(config, Layout.of(config, 1), form)
        shape = tuple(blank.tokens.shape)
        return replace(blank, tokens=torch.randint(config.model.vocab_size or 1, shape, generator=generator))

    found: dict[str, Any] = {"device": "cpu", "torch": torch.__version__}
    if device == "cpu":
        found["tensors"] = observe(config, Mesh.single(), batch).peak
    engine = build_engine(config, Mesh.single(), device)
    found["start_seconds"] = time.perf_counter() - begun
    cuda = torch.cuda if device != "cpu" else None
    if cuda is not None:
        found |= {"device": cuda.get_device_name(), "building": cuda.max_memory_allocated()}
        cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < WARM_UP + FEWEST or (sum(times) < seconds and len(times) < WARM_UP + MOST):
        tokens = batch(len(times))
        begun = time.perf_counter()
        engine.step(tokens, config.optimizer.lr)
        if cuda is not None:
            cuda.synchronize()
        times.append(time.perf_counter() - begun)
        if sum(times) > 3 * seconds and len(times) > WARM_UP:
            break
    later = times[WARM_UP:]
    found |= {"seconds": median(later), "fastest": min(later), "slowest": max(later), "steps": len(later)}
    found["first_step_seconds"] = times[0]
    if cuda is not None:
        free, whole = cuda.mem_get_info()
        found |= {"tensors": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}
        found |= {"process": whole - free, "context": whole - free - cuda.memory_reserved(), "capacity": whole}
    torch.distributed.destroy_process_group()
    return found


def _serve(name: str, more: list[str], device: str, seconds: float, pipe: Connection) -> None:
    """A process that measures one case and sends what it found."""
    try:
        pipe.send(measured(configured(name, more), device, seconds))
    except Exception as error:  # the reason belongs into the row, and the next case is measured
        pipe.send({"error": f"{type(error).__name__}: {str(error)[:500]}"})
        raise


def in_process(name: str, more: list[str], device: str, seconds: float, limit: float) -> dict[str, Any]:
    """`measured`, in a process of its own with a time limit in seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(name, more, device, seconds, theirs))
    begun = time.perf_counter()
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit) else {"error": f"not done after {limit:.0f} s"}
    except EOFError:
        process.join()
        found = {"error": f"its process ended with status {process.exitcode}"}
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return {**found, "wall_seconds": round(time.perf_counter() - begun, 1)}


def _error(told: float | None, right: float | None) -> str:
    return f"{told / right - 1:+.1%}" if told and right else ""


def _number(value: float | None, unit: float, digits: int = 2) -> str:
    return f"{value / unit:,.{digits}f}" if value else ""


def markdown(rows: list[dict[str, Any]]) -> str:
    """Memory, then time, and the errors in a line each. GiB (of small models MiB) and milliseconds."""
    largest = max(((row.get(part) or {}).get("tensors", 0) for row in rows for part in PARTS), default=0)
    name, size = ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)
    head = ["configuration", f"tensors, {name}", "planned", "error", "rehearsed", "error"]
    head += ["reserved", "process", "planned in all", "error", "rehearsed in all", "error"]
    memory, times = [head], [["configuration", "step, ms", "planned, ms", "error", "first step, s", "start, s"]]
    for row in rows:
        plan, rehearsal, real = (row.get(part) or {} for part in PARTS)
        told = [row["case"] + (f" ({real['error']})" if "error" in real else ""), _number(real.get("tensors"), size)]
        for each in (plan, rehearsal):
            told += [_number(each.get("tensors"), size), _error(each.get("tensors"), real.get("tensors"))]
        told += [_number(real.get(key), size) for key in ("reserved", "process")]
        for each in (plan, rehearsal):
            told += [_number(each.get("total"), size), _error(each.get("total"), real.get("process"))]
        memory.append(told)
        own = [_number(real.get("seconds"), 1e-3, 1), _number(plan.get("seconds"), 1e-3, 1)]
        own.append(_error(plan.get("seconds"), real.get("seconds")))
        times.append([
            row["case"],
            *own,
            *(_number(real.get(f"{key}_seconds"), 1.0, 1) for key in ("first_step", "start")),
        ])
    lines = [grid(memory), "", grid(times), ""]
    for part, key, against in (
        ("planned", "tensors", "tensors"),
        ("rehearsed", "tensors", "tensors"),
        ("planned", "total", "process"),
        ("rehearsed", "total", "process"),
        ("planned", "seconds", "seconds"),
    ):
        pairs = [((row.get(part) or {}).get(key), (row.get("measured") or {}).get(against)) for row in rows]
        errors = [abs(told / right - 1) for told, right in pairs if told and right]
        if errors:
            line = f"{part} {key} against measured {against}: {len(errors)} configurations"
            lines.append(f"{line}, median error {median(errors):.1%}, largest {max(errors):.1%}\n")
    return "\n".join(lines)


def completed(options: argparse.Namespace, rows: dict[str, dict[str, Any]], keep: Callable[[], None]) -> int:
    """Add the parts that are asked for to the rows, and return the number of failed measurements."""
    at, failed = cluster(1, options.gpu, path=options.machine), 0
    figures = {"gpu": options.gpu, "figures": at.device.model_dump()}
    settings = {"planned": figures, "rehearsed": figures, "measured": {"device": options.device}}
    for name in options.cases:
        config = configured(name, options.set)
        row = rows.get(name)
        if row is None or row["overrides"] != [*CASES[name][1], *options.set]:
            row = rows[name] = {"case": name, "overrides": [*CASES[name][1], *options.set]}
        for part in options.parts:
            known = row.get(part)
            if known is not None and "error" not in known and known.get("settings") == settings[part]:
                continue
            if part == "measured":
                found = in_process(name, options.set, options.device, options.seconds, options.limit)
                failed += "error" in found
            else:
                found = {"planned": planned, "rehearsed": rehearsed}[part](config, at)
            row[part] = {"settings": settings[part], **found}
            print(f"{name}: {part} {json.dumps(row[part])}", file=sys.stderr, flush=True)
            keep()
    return failed


def options(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(CASES)}"
    parser.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT, metavar="NAME", help=names)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    share(parser, "--device", "--machine")
    parser.add_argument(
        "--gpu", default="h100", help="whose figures predict, of megatron/plan/devices.yml or --machine"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of steps of a case, about (default: 6)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case is given up")
    parser.add_argument("--set", nargs="+", default=[], metavar="key.path=value", help="for all cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows as they are made. Parts in it are kept")
    parser.add_argument("--markdown", type=Path, metavar="FILE")


def measure(given: argparse.Namespace) -> Result:
    """Make rows and write them."""
    rows: dict[str, dict[str, Any]] = {}
    if given.json and given.json.exists():
        rows = {row["case"]: row for row in json.loads(given.json.read_text(encoding="utf-8"))}

    def keep() -> None:
        if given.json:
            given.json.write_text(json.dumps([*rows.values()], indent=1) + "\n", encoding="utf-8")
        if given.markdown:
            given.markdown.write_text(markdown([*rows.values()]) + "\n", encoding="utf-8")

    failed = completed(given, rows, keep)
    keep()
    asked = [rows[name] for name in given.cases]
    return Result(asked, markdown(asked), int(failed > 0))
