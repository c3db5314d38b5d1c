"""Text next to the table: warnings, why a layout was not chosen, and changes that make an impossible request fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.config import Config, ConfigError, Problem
from megatron.config.optimizer_kind import state_bytes
from megatron.config.rule_context import RuleContext
from megatron.config.rules.cost import gib, kept_checkpoints
from megatron.config.source.origins import DEFAULT
from megatron.model.costs.describe import totals

from .candidate import Candidate
from .devices import Cluster, Device
from .memory import TIGHT
from .search import LONG, STRUCTURE, Answers, Plan, Question

TRAFFIC = "zero.stage"  # whose warning the plan has figures for


def largest(plan: Plan) -> str:
    """The largest part of a layout's memory, in words."""
    name, size = max(plan.memory.parts.items(), key=lambda each: each[1])
    return f"{name} {gib(size)}"


def remarks(question: Question, plan: Plan) -> list[str]:
    """Warnings about a valid layout."""
    choice, at, found = plan.choice, question.at, []
    if choice.tensor > at.per_host or at.per_host % choice.tensor:
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
    asked = {"sequence": named.get("tensor", 1) > 1, "context": folded, "expert": folded if question.experts() else 1}
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
    inner = named.get("tensor", 1) * named.get("pipeline", 1) * context
    devices, batch = question.at.devices, question.batches.common
    if max(context, folded) > 1 and training.sequence_length < LONG:
        return f"ranks share sequences of {LONG:,} tokens or more, and these have {training.sequence_length:,}"
    if devices % inner:
        return f"tensor * pipeline * context = {inner} must divide them"
    if batch % (devices // inner * named.get("micro_batch", 1)):
        return f"data {devices // inner} * micro_batch {named.get('micro_batch', 1)} must divide the batch of {batch}"
    if named.get("zero") == 3 and named.get("recompute") == "selective":
        return "recompute must not be selective with ZeRO 3"
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
        legal = [each for each in _near(at.devices, at.per_host) if any(question.on(at.sized(each)).structures())]
        fix = f"use {' or '.join(map(str, legal))} devices" if legal else "use another training.global_batch_size"
        more = -(-batch // at.devices) * at.devices
        return Problem("--gpus", rule, f"{fix}, or training.global_batch_size={more}", at.devices)
    closest = answers.closest
    rule = (
        f"no layout fits: the smallest ({closest.choice}) needs {gib(closest.memory.total)} of "
        f"{gib(at.device.bytes)}, mostly {largest(closest)}"
    )
    return Problem("--gpus", rule, "; or ".join(changes(question, closest, devices)), at.devices)


def _near(devices: int, per_host: int) -> list[int]:
    """Numbers of devices near `devices` that fill hosts, in increasing order."""
    hosts = devices // per_host
    return [each * per_host for each in range(max(1, hosts - 1), hosts + 3) if each * per_host != devices]


def changes(question: Question, closest: Plan, devices: dict[str, Device]) -> list[str]:
    """The smallest change of each kind with which a layout fits."""
    at, found = question.at, []
    for factor in (2, 4, 8, 16, 32):
        wider = _grown(question.at, factor)
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


def _grown(at: Cluster, factor: int) -> Cluster:
    devices = at.devices * factor
    return replace(at, devices=devices, per_host=min(at.device.per_host, devices))
