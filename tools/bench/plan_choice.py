#!/usr/bin/env python3
"""Compare the plan's first choice with the best layout that a CPU finds by trying all.

    python tools/bench/plan_choice.py [--ranks 2] [--steps 8] [--output choice.json] [--minutes 60]

Five small models are trained on every layout that the plan finds for two ranks of the device `cpu`. For each the result
has the predicted and the measured time of a step of every layout, and how much slower than the best the plan's first
choice is. Run it on a quiet machine: times on a busy one say nothing.

With --output, runs are written as they end, and those that are there are kept: a comparison can be stopped and
continued. No run is begun after --minutes.
"""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from megatron.plan.devices import cluster  # noqa: E402
from megatron.plan.search import Plan, Question  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# Large enough that a step is more than messages of a few bytes.
COMMON = [
    "training.sequence_length=128",
    "training.global_batch_size=8",
    "data.synthetic=copy",
    "data.train=null",
    "schedule.warmup_steps=1",
    "checkpoint.every=null",
    "logging.every=1",
    "launch.device=cpu",
]
CASES = {
    "llama": ("tiny_llama", ["model.layers=(attention/mlp) x4"]),
    "neox": ("tiny_neox", ["model.layers=(attention/mlp) x4"]),
    "mixtral": ("tiny_mixtral", []),
    "mamba2": ("tiny_mamba2", []),
    "rwkv7": ("tiny_rwkv7", []),
}


def measured(path: Path, overrides: list[str], plan: Plan, ranks: int, steps: int) -> float | None:
    """Seconds of a step, as the run's own records have it; None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        layout = Path(folder, "layout.yml")
        layout.write_text(plan.choice.lines(), encoding="utf-8")
        words = [str(path), str(layout), *overrides, f"training.steps={steps}", f"run.dir={folder}/run"]
        command = [sys.executable, str(ROOT / "deepy.py"), "--ranks", str(ranks), str(ROOT / "train.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            return None
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    tokens = rows[0]["tokens"] / max(1, rows[0]["step"])
    return tokens / median(rates[len(rates) // 2 :])


def case(
    name: str, ranks: int, steps: int, done: dict[str, Any], keep: Callable[[], None], end: float
) -> dict[str, Any]:
    """All layouts of a case, and how the plan's first does among them; None in the place of what is missing.

    Args:
        done: seconds of a step by layout, of runs that have ended; more are added.
        keep: writes them.
        end: on the monotonic clock, after which no run is begun.
    """
    file, own = CASES[name]
    path, overrides = ROOT / "configs" / "test" / f"{file}.yml", [*COMMON, *own]
    answers = Question.of([str(path)], overrides, cluster(ranks, "cpu")).answers()
    rows: list[dict[str, Any]] = []
    for plan in answers.distinct:
        layout = str(plan.choice)
        if layout not in done and time.monotonic() < end:
            done[layout] = measured(path, overrides, plan, ranks, steps)
            print(f"{name}: {layout}: predicted {plan.step.seconds:.4f} s, measured {done[layout]}", file=sys.stderr)
            keep()
        rows.append({"layout": layout, "predicted": plan.step.seconds, "measured": done.get(layout)})
    times = [row["measured"] for row in rows if row["measured"] is not None]
    first = rows[0]["measured"] if rows else None
    whole = len(times) == len(rows)
    return {"case": name, "layouts": rows, "first_is_slower_by": first / min(times) - 1 if first and whole else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, help="seconds of steps as runs end; those in it are kept")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is begun after them (default: 60)")
    options = parser.parse_args()
    end, about = time.monotonic() + 60 * options.minutes, f"{options.ranks} ranks, {options.steps} steps"
    done: dict[str, Any] = {}
    if options.output and options.output.exists():
        done = json.loads(options.output.read_text(encoding="utf-8"))

    def keep() -> None:
        if options.output:
            options.output.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")

    for name in options.cases:
        own = done.setdefault(f"{name} on {about}", {})
        found = case(name, options.ranks, options.steps, own, keep, end)
        missing = sum(each["measured"] is None for each in found["layouts"])
        slower = found["first_is_slower_by"]
        told = f"{missing} not measured" if slower is None else f"the first is {slower:.1%} slower than the best"
        print(f"{name}: {len(found['layouts'])} layouts, {told}")
        for each in found["layouts"]:
            print(f"  {each['layout']}: predicted {each['predicted']:.4f} s, measured {each['measured']}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
