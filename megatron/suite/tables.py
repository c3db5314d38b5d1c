"""Output of the suite tool: its plan, its progress, and its results with their spread over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.arithmetic.batches import batches_of
from megatron.config.problems import UserError, aligned, counted
from megatron.config.resolution import Resolved

from .members import Agreement, State, Suite, agreement, data_group

SEED = "seed"  # the axis over which results are averaged


def last_step(resolved: Resolved) -> int:
    """The updates after which a run is finished."""
    return resolved.config.training.stop_at_step or resolved.config.training.steps


def size_of(resolved: Resolved, first: int) -> tuple[int, int]:
    """(parameters, FLOPs of the updates from `first` on, forward and backward) of a run, counted by its layers.

    Raises:
        UserError: its vocabulary is not known yet.
    """
    from megatron.model.costs.describe import totals, training_operations

    if resolved.config.model.vocab_size is None:
        raise UserError("sizes need the vocabulary's: give model.vocab_size, or a local tokenizer in tokenizer.path")
    total = totals(resolved.config)
    flops = [training_operations(resolved.config, step) for step in (first, last_step(resolved))]
    return total.parameters, flops[1] - flops[0]


def plan_document(suite: Suite, resolved: Mapping[str, Resolved], states: Mapping[str, State]) -> dict[str, Any]:
    """Every member with its size, its data and its state, as JSON."""
    members, ranks = {}, ["--ranks", str(suite.ranks)] if suite.ranks else []
    for member in suite.members:
        config = resolved[member.name].config
        parameters, flops = size_of(resolved[member.name], member.first)
        steps, before = last_step(resolved[member.name]) - member.first, batches_of(config).before
        tokens = (before(member.first + steps) - before(member.first)) * config.training.sequence_length
        members[member.name] = {
            "values": dict(member.values),
            "trunk": member.trunk.name if member.trunk else None,
            "parameters": parameters,
            "first_step": member.first,
            "steps": steps,
            "tokens": tokens,
            "flops": flops,
            "data": data_group(config),
            "state": state_word(states[member.name], last_step(resolved[member.name])),
            "step": states[member.name].step,
            "command": ["./deepy.py", *ranks, "train.py", *member.words],
        }
    return {"suite": suite.name, "folder": str(suite.folder), "axes": dict(suite.axes), "members": members}


def state_word(state: State, end: int) -> str:
    """State of a run. A run with a last step, such as a branch, is finished there."""
    return "finished" if state.word == "stopped" and state.step >= end else state.word


def status_lines(states: Mapping[str, State], ends: Mapping[str, int]) -> list[str]:
    """Progress of every member."""
    rows, words = [["member", "state", "step", "of", "loss"]], list[str]()
    for name, state in states.items():
        loss = "" if state.loss is None else f"{state.loss:.4f}"
        words.append(state_word(state, ends[name]))
        rows.append([name, words[-1], f"{state.step:,}", f"{ends[name]:,}", loss])
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return [*aligned(rows), "", counts]


def agreements(suite: Suite, resolved: Mapping[str, Resolved], states: Mapping[str, State]) -> dict[str, Agreement]:
    """By the name of their data: whether the members that should have read the same batches have."""
    groups: dict[str, dict[str, State]] = {}
    for member in suite.members:
        groups.setdefault(data_group(resolved[member.name].config), {})[member.name] = states[member.name]
    return {name: agreement(group) for name, group in groups.items()}


def agreement_lines(found: Mapping[str, Agreement]) -> list[str]:
    """A sentence for each group of runs."""
    lines = []
    for name, each in found.items():
        if each.unlike is not None:
            step, one, other = each.unlike
            lines.append(f"data {name}: DIFFERENT batches at step {step}: {one} and {other}")
        elif each.steps:
            runs = counted(len(each.members), "run")
            lines.append(f"data {name}: {runs} read the same batches ({each.steps:,} steps compared)")
        else:
            lines.append(f"data {name}: nothing to compare yet ({len(each.members)} runs have begun)")
    return lines


def results(suite: Suite, states: Mapping[str, State]) -> list[dict[str, Any]]:
    """The results of every combination of values, averaged over the axis `seed` where the suite has one.

    Each has `values`, `runs`, and under `results` for each number its mean, its standard deviation over the runs (null
    for one run) and its number of runs."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for member in suite.members:
        key = tuple((axis, value) for axis, value in member.values.items() if axis != SEED)
        groups.setdefault(key, []).append(member.name)
    found = []
    for key, names in groups.items():
        numbers: dict[str, list[float]] = {}
        for state in (states[name] for name in names):
            own = {} if state.loss is None else {"training loss": state.loss}
            own |= {f"{name} loss": value for name, value in state.validation.items()} | dict(state.tasks)
            for label, value in own.items():
                numbers.setdefault(label, []).append(value)
        spread = {label: _spread(values) for label, values in numbers.items()}
        found.append({"values": dict(key), "runs": names, "results": spread})
    return found


def _spread(values: Sequence[float]) -> dict[str, Any]:
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
    return {"mean": mean, "deviation": deviation, "runs": len(values)}


def result_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The results as a table: a mean, and after ± the standard deviation over seeds."""
    labels = list(dict.fromkeys(label for each in found for label in each["results"]))
    axes = list(found[0]["values"]) if found else []
    rows = [[*axes, "runs", *labels]]
    for each in found:
        cells = [each["results"].get(label) for label in labels]
        rows.append([*each["values"].values(), str(len(each["runs"])), *map(_cell, cells)])
    return aligned(rows)


def _cell(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    around = "" if spread["deviation"] is None else f" ± {spread['deviation']:.4f}"
    return f"{spread['mean']:.4f}{around}"
