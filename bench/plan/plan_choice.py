"""Compare the plan's first choice with the best layout that a CPU finds by trying all.

    python -m bench plan-choice --output choice.json [--clock cpu] [--machine machine.yml --device mine]

Five small models make steps on every layout that the plan finds for two ranks of a device. For each the result has the
predicted and the measured time of a step of every layout, and how much slower than the best the plan's first choice is.
Layouts of a case are timed in turns, one round after the other (bench/plan/step_times.py). Take the times of the
wall's clock on a quiet machine. On a busy one use --clock cpu, which excludes the time that ranks wait for each other.

With --output rounds are written as they end, and rounds of the same --ranks and --steps in the file are kept: a
comparison can be stopped and continued. No layout is begun after --minutes. The exit status is 1 if a first choice is
more than 10 % slower than the best, or if a layout has failed or has not had all its rounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from bench.plan.step_times import Rounds, round_of, seconds, spread
from bench.runner import ROOT, Result, share
from megatron.plan.devices import cluster
from megatron.plan.search import Plan, Question

PROMISE = 0.1  # that the first choice is slower than the best, at most

# Large enough that a step is more than messages of a few bytes.
COMMON = [
    "training.sequence_length=128",
    "training.global_batch_size=8",
    "data.synthetic=copy",
    "data.train=null",
    "schedule.warmup_steps=1",
    "training.steps=64",
]
CASES = {
    "llama": ("tiny_llama", ["model.layers=(attention/mlp) x4"]),
    "neox": ("tiny_neox", ["model.layers=(attention/mlp) x4"]),
    "mixtral": ("tiny_mixtral", []),
    "mamba2": ("tiny_mamba2", []),
    "rwkv7": ("tiny_rwkv7", []),
}


def asked(name: str, options: argparse.Namespace) -> tuple[Question, list[Plan]]:
    """A case, and the fastest layout of each structure in the plan's order."""
    file, own = CASES[name]
    path = ROOT / "configs" / "test" / f"{file}.yml"
    at = cluster(options.ranks, options.device, path=options.machine)
    question = Question.of([str(path)], [*COMMON, *own], at)
    return question, question.answers().distinct


def result(name: str, plans: list[Plan], rounds: Rounds, number: int, clock: str) -> dict[str, Any]:
    """All layouts of a case, and the rank of the plan's first among them. None stands for missing values."""
    rows: list[dict[str, Any]] = []
    for plan in plans:
        own = rounds.whole(key(name, plan), number)
        measured, apart = (seconds(own, clock), spread(own, clock)) if own else (None, None)
        rows.append({"layout": str(plan.choice), "predicted": plan.step.seconds, "measured": measured, "spread": apart})
    times = [row["measured"] for row in rows if row["measured"] is not None]
    whole = times and len(times) == len(rows)
    return {"case": name, "layouts": rows, "first_is_slower_by": times[0] / min(times) - 1 if whole else None}


def key(name: str, plan: Plan) -> str:
    """Of a layout of a case in the file."""
    return f"{name}: {plan.choice}"


def text(found: dict[str, Any]) -> str:
    """A case for people."""
    missing, slower = sum(each["measured"] is None for each in found["layouts"]), found["first_is_slower_by"]
    told = f"{missing} not measured" if slower is None else f"the first is {slower:.1%} slower than the best"
    lines = [f"{found['case']}: {len(found['layouts'])} layouts, {told}"]
    for each in found["layouts"]:
        line = f"  {each['layout']}: predicted {1e3 * each['predicted']:.1f} ms"
        if each["measured"] is not None:
            line += f", measured {1e3 * each['measured']:.1f} ms (rounds are {each['spread']:.0%} apart)"
        lines.append(line)
    return "\n".join(lines)


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "--ranks", "--rounds", "--clock", "--machine", rounds=3)
    parser.add_argument(
        "--steps", type=int, default=8, help="of a layout in a round, after the first ones (default: 8)"
    )
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--device", default="cpu", help="whose figures predict, of megatron/plan/devices.yml or --machine"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="rounds as they end. Rounds in it are kept")
    parser.add_argument("--minutes", type=float, default=60.0, help="no layout is begun after them (default: 60)")


def measure(given: argparse.Namespace) -> Result:
    """Take rounds, and compare."""
    rounds = Rounds(given.output, time.monotonic() + 60 * given.minutes)
    cases = {name: asked(name, given) for name in given.cases}
    layouts = {key(name, plan): (question, plan) for name, (question, plans) in cases.items() for plan in plans}
    settings = {"ranks": given.ranks, "steps": given.steps, "overrides": COMMON}

    def timed(layout: str) -> dict[str, float]:
        question, plan = layouts[layout]
        return round_of(question.resolved(plan.choice).config, given.ranks, given.steps)

    rounds.take(dict.fromkeys(layouts, settings), timed, given.rounds)
    found = [result(name, plans, rounds, given.rounds, given.clock) for name, (_, plans) in cases.items()]
    slower = [each["first_is_slower_by"] for each in found]
    failed = not slower or any(each is None or each > PROMISE for each in slower)
    return Result(found, "\n".join(map(text, found)), int(failed))
