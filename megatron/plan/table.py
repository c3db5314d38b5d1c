"""The answers of a search for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.rules.cost import gib
from megatron.config.words import aligned

from .advice import checkpoint_bytes, remarks, warned, why_not
from .devices import Device, describe_cluster, known_devices
from .memory import TIGHT
from .search import Answers, Plan

SHOWN = 8
CONVENTION = (
    "MFU: model FLOPs without recomputation, attention over the whole square of tokens, as a share of the devices' "
    "dense peak"
)


@dataclass(frozen=True)
class Cost:
    """Cost of the whole token budget."""

    days: float  # of running, without failures
    hours: float  # of devices
    energy: float  # MWh of the devices, without hosts and cooling
    price: float | None  # in the currency of the price per device and hour, None without a price

    @classmethod
    def of(cls, answers: Answers, plan: Plan, price: float | None) -> Cost:
        question = answers.question
        seconds = question.seconds(plan)
        hours = seconds / 3600 * question.at.devices
        energy = hours * question.at.device.watts / 1e6
        return cls(seconds / 86400, hours, energy, None if price is None else hours * price)


def document(answers: Answers, price: float | None = None, named: dict[str, Any] | None = None) -> dict[str, Any]:
    """One JSON document."""
    question = answers.question
    training = question.base.training
    size, count = checkpoint_bytes(question.base)
    rows = []
    for plan in answers.plans:
        rows.append({
            **plan.to_json(),
            "cost": vars(Cost.of(answers, plan, price)),
            "yaml": question.lines(plan.choice),
            "remarks": remarks(question, plan),
            "warnings": [f"{each.key}: {each.rule}" for each in question.warnings(plan.choice)],
        })
    return {
        "machine": describe_cluster(question.at),
        "precision": question.base.precision.compute,
        "tokens_per_step": training.global_batch_size * training.sequence_length,
        "tokens": question.tokens,
        "mfu_convention": CONVENTION,
        "plans": rows,
        "structures": answers.tried,
        "too_large": answers.large,
        "refused": dict(answers.refused),
        "checkpoints": {"bytes_each": size, "kept": count, "bytes": size * count},
        **({"why_not": why_not(question, answers, named)} if named else {}),
    }


def text(
    answers: Answers,
    price: float | None = None,
    named: dict[str, Any] | None = None,
    disk: float | None = None,
    shown: int = SHOWN,
) -> str:
    """A ranked table, the YAML of the first layout, and notes."""
    question, best = answers.question, answers.plans[0]
    at, training = question.at, question.base.training
    shown_plans = answers.distinct[:shown]
    unsaid = " (not in the files: without it a run takes fp32)" if "precision" in question.missing else ""
    hosts = f"{at.hosts} hosts of {at.per_host}" if at.hosts > 1 else "one host"
    lines = [
        f"{at.devices} x {at.device.name} on {hosts}, {question.base.precision.compute}{unsaid}, "
        f"{question.tokens / 1e9:,.1f} billion tokens in {training.steps:,} steps of {question.batches} samples",
        "",
        *align_lines([
            ["", *_HEADER],
            *[_row(answers, plan, number, price) for number, plan in enumerate(shown_plans, 1)],
        ]),
        "",
        f"{len(answers.plans)} layouts fit, {answers.large} are too large, {sum(answers.refused.values())} of "
        f"{answers.tried} structures are refused. {CONVENTION}.",
        "",
        "The first, as lines of YAML:",
        *("    " + line for line in question.lines(best.choice).splitlines()),
        "Its step: " + ", ".join(f"{name} {value / best.step.seconds:.0%}" for name, value in _shares(best)),
        "Its memory: "
        + ", ".join(f"{name} {gib(value)}" for name, value in best.memory.parts.items() if value >= 2**26),
    ]
    lines += [f"Note: {remark}." for remark in remarks(question, best)]
    lines += [f"Layout {words}." for words in warned(answers, shown_plans)]
    lines += _disk(answers, disk)
    if at.device.name != "cpu":
        lines.append(
            f"`deepy train --rehearse --ranks {at.devices} --device {_name(at.device)}` with these lines counts the "
            "memory of each kind of rank, and gives both numbers."
        )
    if named:
        lines += ["", "Why not the named layout:", *("    " + line for line in why_not(question, answers, named))]
    return "\n".join(lines)


def _name(device: Device) -> str:
    """In the table of devices."""
    return next((name for name, known in known_devices()[0].items() if known == device), "NAME --machine FILE")


_HEADER = ["tensor", "pipeline", "per rank", "context", "folded", "expert", "data", "ZeRO", "micro", "recompute"]
_HEADER += ["step s", "tokens/s", "MFU", "GiB", "of memory", "days", "MWh", "cost"]


def _row(answers: Answers, plan: Plan, number: int, price: float | None) -> list[str]:
    choice, cost = plan.choice, Cost.of(answers, plan, price)
    data = answers.question.at.devices // choice.inner
    each, folded = (str(size) if size > 1 else "" for size in (choice.stages_per_rank, choice.folded))
    sizes = [choice.expert, data, choice.zero, choice.micro_batch]
    return [
        str(number),
        *map(str, (choice.tensor, choice.pipeline, each, choice.context, folded, *sizes)),
        choice.recompute,
        f"{plan.step.seconds:,.3f}",
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.mfu:.1%}",
        f"{plan.memory.total / 2**30:,.1f}",
        f"{plan.share:.0%}" + ("!" if plan.share > TIGHT else ""),
        f"{cost.days:,.1f}",
        f"{cost.energy:,.1f}",
        "" if cost.price is None else f"{cost.price:,.0f}",
    ]


def _shares(plan: Plan) -> list[tuple[str, float]]:
    found = sorted(plan.step.parts.items(), key=lambda each: -each[1])
    return [(name, value) for name, value in found if value >= 0.005 * plan.step.seconds]


def _disk(answers: Answers, disk: float | None) -> list[str]:
    size, count = checkpoint_bytes(answers.question.base)
    if not count:
        return []
    told = f"{count:,} checkpoints of {gib(size)} are kept, {gib(size * count)} in all"
    if disk is not None and size * count > disk:
        fix = "give checkpoint.keep_last, or save less often"
        return [f"Warning: {told}, more than the disk's {gib(disk)}: {fix}."]
    return [f"Note: {told}."]


def align_lines(rows: list[list[str]]) -> list[str]:
    """Lines of a table, aligned to the right, without empty columns."""
    kept = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return aligned([[row[column] for column in kept] for row in rows], left=0)
