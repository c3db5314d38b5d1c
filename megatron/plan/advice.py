"""The answers of a search for people and for programs, with warnings, and reasons and changes of what does not fit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config import Config, ConfigError, Problem
from megatron.config.arithmetic.pipeline_costs import live_micro_batches
from megatron.config.optimizer_kind import state_bytes
from megatron.config.problems import aligned
from megatron.config.rule_context import RuleContext
from megatron.config.rules.cost import gib, kept_checkpoints
from megatron.config.source.layers import DEFAULT
from megatron.model.costs.describe import totals

from .candidate import Candidate, apply
from .devices import Device, describe_cluster, known_devices
from .memory import TIGHT
from .search import LONG, NOT_TRIED, STRUCTURE, Answers, Plan, Question

TRAFFIC = "zero.stage"  # whose warning the plan has figures for


def largest(plan: Plan) -> str:
    """The largest part of a layout's memory, in words."""
    name, size = max(plan.memory.parts.items(), key=lambda each: each[1])
    return f"{name} {gib(size)}"


def remarks(question: Question, plan: Plan) -> list[str]:
    """Warnings about a valid layout."""
    choice, at, found = plan.choice, question.at, []
    if choice.grid > at.per_host or at.per_host % choice.grid:
        found.append(
            f"tensor parallel ranks span hosts of {at.per_host}: their sums, "
            f"{plan.step.parts['tensor'] / plan.step.seconds:.0%} of the step, cross the network"
        )
    if plan.step.parts["host"]:
        found.append(
            f"at ZeRO 3 the step waits for DeepSpeed's Python, {plan.step.parts['host'] / plan.step.seconds:.0%} of it "
            "if this host is as fast as the one that was measured (docs/planning.md)"
        )
    if plan.share > TIGHT:
        found.append(f"memory is near its limit ({plan.share:.0%}), mostly {largest(plan)}")
    return found


def warned(answers: Answers, plans: Sequence[Plan]) -> list[str]:
    """Warnings of `config check` about these plans, with their numbers from 1 and the plan's answer."""
    rows: dict[tuple[str, str], tuple[Problem, list[int]]] = {}
    for number, plan in enumerate(plans, 1):
        for each in answers.question.warnings(plan.choice):
            key = (each.key, re.sub("[0-9]+", "", each.rule))
            rows.setdefault(key, (each, []))[1].append(number)
    found = []
    for each, (first, *others) in rows.values():
        also = f" (and {', '.join(map(str, others))} with numbers of their own)" if others else ""
        rule = each.rule if each.rule.startswith(each.key) else f"{each.key}: {each.rule}"
        words = f"{first}{also}: `config check` warns: {rule}. Fix: {each.fix}"
        found.append(words + (f". {_less_often(answers)}" if each.key == TRAFFIC else ""))
    return found


def _less_often(answers: Answers) -> str:
    """Gain or loss if gradients are reduced once per step."""
    best, once = answers.plans[0], next((plan for plan in answers.plans if plan.choice.zero < 2), None)
    counted = "The steps above count that traffic"
    if once is None:
        return f"{counted}, and no layout with ZeRO 1 fits"
    times = once.step.seconds / best.step.seconds
    return (
        f"{counted}. The best with ZeRO 1 ({once.choice}) takes {times:.2f} times the first one's step and "
        f"{once.share:.0%} of memory"
    )


def checkpoint_bytes(config: Config) -> tuple[float, int]:
    """(bytes of a checkpoint, number of checkpoints that the run keeps)."""
    state = state_bytes(config) if config.checkpoint.optimizer_state else 0
    context = RuleContext(config, None, lambda path: DEFAULT)
    return totals(config).parameters * (4 + state), kept_checkpoints(context)


def why_not(question: Question, answers: Answers, named: dict[str, Any]) -> list[str]:
    """Reasons against a layout that a user names."""
    best = answers.plans[0] if answers.plans else None
    if named.keys() >= {"tensor", "pipeline"}:
        problem = _refused(question, named)
        if problem is not None:
            return [f"the launcher refuses it: {problem.key}: {problem.rule}", f"fix: {problem.fix}"]
    own = question.answers(named)
    if not own.plans and own.closest is None:
        if own.refusal is not None:
            return [f"the launcher refuses it: {own.refusal.key}: {own.refusal.rule}", f"fix: {own.refusal.fix}"]
        return [f"no layout of {question.at.devices} devices has these values: {_why_empty(question, named)}"]
    if not own.plans and own.closest is not None:
        plan = own.closest
        over = plan.memory.total - question.at.device.bytes
        return [
            f"it does not fit: at least {gib(plan.memory.total)} ({plan.choice}), {gib(over)} more than a device has, "
            f"mostly {largest(plan)}"
        ]
    plan = own.plans[0]
    if best is not None and plan.step.seconds < best.step.seconds and plan.turn > best.turn:
        return [
            f"it is faster ({plan.choice}, {plan.step.seconds:.3f} s a step, against {best.step.seconds:.3f} s) by "
            f"less than the formulas err, and takes {plan.share:.0%} of memory"
        ]
    if best is None or plan.step.seconds <= best.step.seconds:
        return [f"it is the fastest: {plan.choice}, {plan.step.seconds:.3f} s a step"]
    slower = plan.step.seconds / best.step.seconds - 1
    parts = {name: plan.step.parts[name] - best.step.parts[name] for name in plan.step.parts}
    worst = sorted(((value, name) for name, value in parts.items() if value > 0), reverse=True)[:2]
    loses = ", ".join(f"{name} {value / best.step.seconds:+.0%}" for value, name in worst)
    return [
        f"its best form ({plan.choice}) takes {plan.step.seconds:.3f} s a step, {slower:.0%} longer than the first: "
        f"{loses} of the first one's step"
    ]


def _refused(question: Question, named: dict[str, Any]) -> Problem | None:
    """The launcher's problem with a layout. Values that are not named have their defaults, or follow from the named
    ones."""
    folded = named.get("folded", 1)
    runs = max(folded, named.get("depth", 1)) if question.experts() else 1
    alike = named.get("tensor", 1) > 1 == named.get("columns", 1)
    asked = {"sequence": alike, "context": folded, "expert": runs}
    values = {**asked, **named}
    choice = Candidate(**values)
    try:
        question.resolved(choice)
    except ConfigError as error:
        problem = next(each for each in error.problems if each.fatal)
        plain = replace(choice, sequence=False)
        if "sequence" in named or not choice.sequence:
            return problem
        try:
            question.resolved(plain)
        except ConfigError:
            return problem
    return None


def _why_empty(question: Question, named: dict[str, Any]) -> str:
    folded, training = named.get("folded", 1), question.base.training
    context = named.get("context", folded)
    inner = named.get("tensor", 1) * named.get("columns", 1) * named.get("pipeline", 1) * context
    devices, batch = question.at.devices, question.batches.common
    if max(context, folded) > 1 and training.sequence_length < LONG:
        return f"ranks share sequences of {LONG:,} tokens or more, and these have {training.sequence_length:,}"
    if devices % inner:
        return f"tensor * columns * pipeline * context = {inner} must divide them"
    if batch % (devices // inner * named.get("micro_batch", 1)):
        return f"data {devices // inner} * micro_batch {named.get('micro_batch', 1)} must divide the batch of {batch}"
    if named.get("zero") == 3 and named.get("recompute") == "selective":
        return "recompute must not be selective with ZeRO 3"
    if named.get("depth", 1) > 1:
        return "depth is tried where it divides the replicas of a host, with ZeRO 0 to 2 and context=1"
    if folded > 1:
        return "folded goes with context of the same size, tensor=1 and ZeRO 0 to 2"
    return "; ".join(f"{name}={value}" for name, value in named.items() if name in (*STRUCTURE, "micro_batch"))


def why_nothing_fits(question: Question, answers: Answers, devices: dict[str, Device]) -> Problem:
    """Why no layout fits, and the smallest changes that make one fit."""
    at = question.at
    if answers.closest is None:
        rule, fix = f"no legal layout on {at.devices} devices", "use another number of devices"
        if answers.refusal is not None:
            refusal = answers.refusal
            return Problem(refusal.key, f"{rule}: {refusal.rule}", refusal.fix, refusal.value)
        batch = question.batches.common
        rule += (
            f": training.global_batch_size {batch} must be a multiple of micro_batch_size times a data parallel size"
        )
        hosts = at.devices // at.per_host
        others = (each * at.per_host for each in range(max(1, hosts - 1), hosts + 3))
        legal = [n for n in others if n != at.devices and any(question.on(at.sized(n)).structures())]
        fix = f"use {' or '.join(map(str, legal))} devices" if legal else "use another training.global_batch_size"
        more = -(-batch // at.devices) * at.devices
        return Problem("--gpus", rule, f"{fix}, or training.global_batch_size={more}", at.devices)
    closest = answers.closest
    rule = (
        f"no layout fits: the smallest ({closest.choice}) needs {gib(closest.memory.total)} of "
        f"{gib(at.device.bytes)}, mostly {largest(closest)}"
    )
    return Problem("--gpus", rule, ", or ".join(changes(question, closest, devices)), at.devices)


def changes(question: Question, closest: Plan, devices: dict[str, Device]) -> list[str]:
    """The smallest change of each kind with which a layout fits."""
    at, found = question.at, []
    for factor in (2, 4, 8, 16, 32):
        grown = at.devices * factor
        wider = replace(at, devices=grown, per_host=min(at.device.per_host, grown))
        if question.base.training.global_batch_size < wider.devices // (wider.per_host * 8):
            break
        if question.on(wider).answers().plans:
            found.append(f"use {wider.devices} devices")
            break
    larger = sorted((each.memory, name) for name, each in devices.items() if closest.memory.total <= each.bytes)
    if larger:
        found.append(f"use devices with {gib(closest.memory.total)} ({larger[0][1]})")
    if question.base.zero.offload_optimizer.device == "none" and closest.choice.pipeline == 1:
        kept = closest.memory.total - closest.memory.parts["states"]
        if kept <= at.device.bytes:
            found.append("give zero.offload_optimizer.device=cpu")
    length, parts = question.base.training.sequence_length, closest.memory.parts
    passing = parts["activations"] + parts["working"]
    if closest.memory.total - passing / 2 <= at.device.bytes:
        found.append(f"use training.sequence_length={length // 2}")
    return found or ["use a smaller model, or devices with more memory"]


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
    def of(cls, answers: Answers, plan: Plan, price: float | None) -> "Cost":
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
    best = answers.plans[0] if answers.plans else None
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
        "schedules": [each.to_json() for each in question.compared(best)] if best and best.choice.pipeline > 1 else [],
        "schedules_not_tried": NOT_TRIED,
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
    parts = sorted(best.step.parts.items(), key=lambda each: -each[1])
    shares = [(name, value / best.step.seconds) for name, value in parts]
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
        "Its step: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005),
        "Its memory: "
        + ", ".join(f"{name} {gib(value)}" for name, value in best.memory.parts.items() if value >= 2**26),
    ]
    lines += _schedules(question, best)
    lines += [f"Note: {remark}." for remark in remarks(question, best)]
    if any(plan.choice.columns > 1 or plan.choice.depth > 1 for plan in shown_plans):
        lines.append("Note: `deepy plan grids` compares rows, columns and depth, also with AxoNN's published script.")
    lines += [f"Layout {words}." for words in warned(answers, shown_plans)]
    lines += _disk(answers, disk)
    if at.device.name != "cpu":
        names = (name for name, known in known_devices()[0].items() if known == at.device)
        name = next(names, "NAME --machine FILE")
        lines.append(
            f"`deepy train --rehearse --ranks {at.devices} --device {name}` with these lines counts the "
            "memory of each kind of rank, and gives both numbers."
        )
    if named:
        lines += ["", "Why not the named layout:", *("    " + line for line in why_not(question, answers, named))]
    return "\n".join(lines)


def _schedules(question: Question, plan: Plan) -> list[str]:
    """Reason for the schedule of a pipeline: its bubble, activations and messages next to the others'."""
    if plan.choice.pipeline == 1:
        return []
    rows = []
    compared = question.compared(plan)
    for each in compared:
        own, parts = each.choice, each.step.parts
        config = apply(question.base, own, question.at.devices)
        count = config.training.accumulation or 1
        kept = max(live_micro_batches(config.parallel, rank, count) for rank in range(own.pipeline))
        rows.append([
            own.schedule,
            str(own.stages_per_rank),
            f"{parts['bubble'] / each.step.seconds:.1%}",
            f"{kept:g}",
            f"{each.memory.parts['activations'] / 2**30:,.1f}",
            f"{parts['pipeline']:,.3f}",
            f"{each.step.seconds:,.3f}" + ("" if each.share <= 1 else " does not fit"),
        ])
    header = ["schedule", "per rank", "bubble", "micro-batches kept", "GiB of activations", "s of messages", "step s"]
    best = compared[0].choice
    why = f"{best.schedule} with {best.stages_per_rank} per rank has the shortest step that fits"
    named = {each.choice.schedule for each in compared}
    left = [f"Not tried: {name}, since {reason}." for name, reason in NOT_TRIED.items() if name not in named]
    return [f"Its schedule: {why}.", *("    " + row for row in align_lines([header, *rows])), *left]


_HEADER = ["tensor", "columns", "pipeline", "depth", "per rank", "schedule", "context", "folded", "expert", "data"]
_HEADER += ["ZeRO", "micro", "recompute", "step s", "tokens/s", "MFU", "GiB", "of memory", "days", "MWh", "cost"]


def _row(answers: Answers, plan: Plan, number: int, price: float | None) -> list[str]:
    choice, cost = plan.choice, Cost.of(answers, plan, price)
    data = answers.question.at.devices // choice.inner
    sides = (choice.columns, choice.depth, choice.stages_per_rank, choice.folded)
    columns, depth, each, folded = (str(size) if size > 1 else "" for size in sides)
    schedule = choice.schedule if choice.schedule != "1f1b" else ""
    sizes = [choice.expert, data, choice.zero, choice.micro_batch]
    return [
        str(number),
        *map(str, (choice.tensor, columns, choice.pipeline, depth, each, schedule, choice.context, folded, *sizes)),
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
