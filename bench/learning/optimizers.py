"""Compare all optimizers on a tiny model, at equal steps and at equal time.

Each is trained at several learning rates and with several seeds.

python -m bench optimizers --out bench                 the table, bench/results.jsonl and bench/losses.png
python -m bench optimizers --only muon soap --seeds 1
python -m bench optimizers --table bench/results.jsonl

The data are the bytes of this repository's documentation and Python files, a twentieth of them for validation. Time is
that of the processor, of whole steps without evaluation, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.runner import ROOT, Result, grid
from megatron.config.optimizer_kind import kinds_inside

STEPS, WARMUP, BATCH, LENGTH, LOOK = 60, 6, 8, 64, 10
MODEL = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 64,
    "vocab_size": 256,
    "attention": {"heads": 4},
    "norm": {"type": "rmsnorm"},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": 128},
}
# Peak rates, and other differences. Rates are of matrices where an optimizer leaves the rest to AdamW at 3e-3.
CONTENDERS: dict[str, tuple[list[float], dict[str, Any]]] = {
    "adamw": ([2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], {}),
    "lion": ([2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3], {"betas": [0.9, 0.99]}),
    "sgd": ([0.05, 0.1, 0.2, 0.4, 0.8], {}),
    "muon": ([0.01, 0.02, 0.04, 0.08, 0.16], {"lr": 3e-3}),
    "normuon": ([0.01, 0.02, 0.04, 0.08, 0.16], {"lr": 3e-3}),
    "soap": ([1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], {}),
    "adafactor": ([1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], {}),
    "adamw_8bit": ([2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], {}),
    "adam_mini": ([2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], {}),
    "ademamix": ([1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], {"options": {"slow": 0.99, "alpha": 2.0}}),
    "schedule_free_adamw": ([2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], {}),
}


def corpus() -> tuple[Any, Any]:
    """Bytes to train and to validate on."""
    import torch

    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("megatron/**/*.py")])
    whole = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    border = len(whole) * 19 // 20
    return whole[:border], whole[border:]


def drawn(data: Any, seed: int, count: int) -> Any:
    import torch

    starts = torch.randint(len(data) - LENGTH - 1, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def settings(kind: str, rate: float, seed: int) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"type": kind, "lr": rate, "weight_decay": 0.1, **CONTENDERS[kind][1]}
    if kind in ("muon", "normuon"):
        optimizer["muon_lr"] = rate
    training = {"steps": STEPS, "sequence_length": LENGTH, "micro_batch_size": BATCH, "seed": seed}
    schedule = {"type": "constant" if kinds_inside()[kind].averages else "cosine"}
    whole: dict[str, Any] = {"model": MODEL, "training": training, "optimizer": optimizer, "schedule": schedule}
    return whole | {"data": {"synthetic": "copy"}}


def rate_at(kind: str, step: int) -> float:
    """The share of the peak rate: a warmup, and then a cosine to a tenth, or all of it."""
    fall = 0.45 * (1 + math.cos(math.pi * max(step - WARMUP, 0) / (STEPS - WARMUP)))
    return min((step + 1) / WARMUP, 1.0 if kinds_inside()[kind].averages else 0.1 + fall)


@contextlib.contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """With the weights that the optimizer evaluates, where they differ from the trained weights."""
    find: Any = getattr(optimizer, "evaluation_weights", None)
    pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]] if find else []
    trained = [p.detach().clone() for _, p in pairs]
    for group, p in pairs:
        p.data.copy_(find(group, p, optimizer.state[p]))
    yield
    for (_, p), weights in zip(pairs, trained):
        p.data.copy_(weights)


def run(kind: str, rate: float, seed: int, data: tuple[Any, Any]) -> dict[str, Any]:
    """One training run: processor time and validation loss at every look."""
    import torch
    import torch.nn.functional as F

    from megatron.config import resolve
    from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
    from megatron.model.stack import build_model

    config = resolve(settings(kind, rate, seed))
    model = build_model(config, dtype=torch.float32).train()
    parameters = list(dict.fromkeys(model.parameters()))
    optimizer = build_optimizer(config, parameters)

    def loss(tokens: Any) -> Any:
        logits = model.head.logits(model.stream(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    held, spent, curve = drawn(data[1], 0, 64), 0.0, []
    for step in range(STEPS):
        tokens = drawn(data[0], seed * 1_000_003 + step, BATCH)
        begin = time.process_time()
        set_learning_rate(optimizer, config.optimizer.lr * rate_at(kind, step))
        optimizer.zero_grad()
        loss(tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        spent += time.process_time() - begin
        if (step + 1) % LOOK == 0:
            with torch.no_grad(), evaluating(optimizer):
                curve.append([step + 1, spent, float(loss(held))])
    return {"optimizer": kind, "rate": rate, "seed": seed, "curve": curve}


def at_time(curve: list[list[float]], limit: float) -> float:
    """The loss at the last look within the time."""
    return next((loss for _, spent, loss in reversed(curve) if spent <= limit), math.inf)


def finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: of each optimizer the best rate by its mean loss at the end, and that at AdamW's time."""
    limit = statistics.median(r["curve"][-1][1] for r in results if r["optimizer"] == "adamw")
    heads = ["optimizer", "best rate", "loss at the end", "over seeds", "loss in AdamW's time"]
    lines = [[*heads, "time per step / AdamW's", "loss at the next lower and higher rate"]]
    for kind in dict.fromkeys(r["optimizer"] for r in results):
        own = [r for r in results if r["optimizer"] == kind]
        rates = sorted({r["rate"] for r in own})
        means = {rate: statistics.mean(finite(r["curve"][-1][2]) for r in own if r["rate"] == rate) for rate in rates}
        best = min(rates, key=lambda rate: means[rate])
        runs = [r for r in own if r["rate"] == best]
        ends = [r["curve"][-1][2] for r in runs]
        place = rates.index(best)
        near = [f"{means[rates[i]]:.3f}" if 0 <= i < len(rates) else "–" for i in (place - 1, place + 1)]
        slow = statistics.median(r["curve"][-1][1] for r in own) / limit
        timed = statistics.mean(at_time(r["curve"], limit * 1.02) for r in runs)
        spread = f"{min(ends):.3f} to {max(ends):.3f}"
        lines.append([kind, f"{best:g}", f"{means[best]:.3f}", spread, f"{timed:.3f}", f"{slow:.2f}", ", ".join(near)])
    return grid(lines)


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Left: the loss at the end over rates. Right: over time, at the best rate, all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    colours = plt.get_cmap("tab20")
    for number, kind in enumerate(dict.fromkeys(r["optimizer"] for r in results)):
        own = [r for r in results if r["optimizer"] == kind]
        rates = sorted({r["rate"] for r in own})
        means = [statistics.mean(finite(r["curve"][-1][2]) for r in own if r["rate"] == rate) for rate in rates]
        left.plot(rates, means, "o-", color=colours(number), label=kind)
        best = rates[means.index(min(means))]
        for r in (r for r in own if r["rate"] == best):
            right.plot([p[1] for p in r["curve"]], [p[2] for p in r["curve"]], color=colours(number), linewidth=0.9)
    left.set(xscale="log", xlabel="peak rate", ylabel="validation loss (nats per byte)")
    right.set(xlabel="processor time (s)", ylim=left.get_ylim())
    left.legend(fontsize=8)
    plt.tight_layout()
    plt.savefig(file, dpi=110)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and losses.png")
    parser.add_argument("--table", type=Path, help="print the table of a results.jsonl and run nothing")


def measure(given: argparse.Namespace) -> Result:
    if given.table:
        results = [json.loads(line) for line in given.table.read_text().splitlines()]
        return Result(results, table(results))
    import torch

    torch.set_num_threads(1)
    data, results = corpus(), []
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    for seed in range(1, given.seeds + 1):  # all contenders see a slow hour of the machine alike
        for kind in given.only:
            for rate in CONTENDERS[kind][0]:
                results.append(run(kind, rate, seed, data))
                print(f"{kind} {rate:g} seed {seed}: {results[-1]['curve'][-1][2]:.4f}", file=sys.stderr)
                if given.out:
                    (given.out / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
    if given.out:
        plot(results, given.out / "losses.png")
    return Result(results, table(results) if "adamw" in given.only else "")
