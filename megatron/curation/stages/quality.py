"""Signals of quality as annotations, and thresholds over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron.config.problems import Problem
from megatron.config.section import Section, key
from megatron.config.source.structure import nearest

from ..other_signals import OTHER, Signal, list_signals
from ..signals import DOCUMENT, LINES, TextViews
from .contract import Removed, StageKind, Work
from .texts import file_problem, read_terms

RECORD = "record."  # before the key of an input record, whose number is a signal too


class SignalsSection(Section):
    names: list[str] = key(list, "Signals that are stored with each document. Empty: all of RedPajama v2.")


class KeepSection(Section):
    signals: dict[str, list[float]] = key(
        ..., "Signal -> [least, most]. A document is kept if all its values lie within, bounds included."
    )
    undefined: bool = key(False, "Keep a document that has no value of a signal.")
    lists: dict[str, str] = key(
        dict, "Name -> file of terms, one a line. Each list has signals of its own, such as list.NAME.words."
    )


def _known(names: Iterable[str], path: str, where: str, more: Iterable[str] = ()) -> Iterable[Problem]:
    known = [*DOCUMENT, *LINES, *OTHER, *more]
    for name in names:
        if name not in known and not name.startswith(RECORD):
            rule = f"{path} must name signals of docs/curation.md, or {RECORD}KEY for a number of the input record"
            yield Problem(f"{path}.{name}", rule, nearest(name, known) or "see the table there", where=where)


def _signal_rules(options: SignalsSection, path: str, where: str) -> Iterable[Problem]:
    yield from _known(options.names, f"{path}.names", where)
    for name in options.names:
        if name.startswith(RECORD):
            rule = f"{path}.names must be signals of the text: {name} is stored with each document already"
            yield Problem(f"{path}.names.{name}", rule, "remove it", where=where)


def _keep_rules(options: KeepSection, path: str, where: str) -> Iterable[Problem]:
    for name, file in options.lists.items():
        yield from file_problem(file, f"{path}.lists.{name}", where)
    lists = [signal for name in options.lists for signal in list_signals(name, [])]
    yield from _known(options.signals, f"{path}.signals", where, lists)
    for name, bounds in options.signals.items():
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            rule = f"{path}.signals.{name} must be [least, most], with least at most as large as most"
            yield Problem(f"{path}.signals.{name}", rule, "write two numbers, as in [0, 0.3]", list(bounds), where)
        if name in LINES:
            rule = f"{path}.signals must name signals of documents, and {name} has one value per line"
            yield Problem(f"{path}.signals.{name}", rule, "use a signal of documents", list(bounds), where)


def _annotate(options: SignalsSection) -> Work:
    known: dict[str, Callable[[TextViews], Any]] = {**DOCUMENT, **LINES, **OTHER}
    chosen = {name: known[name] for name in options.names or [*DOCUMENT, *LINES]}

    def work(document: Any) -> None:
        view = TextViews(document.text)
        document.metadata["signals"] = {name: signal(view) for name, signal in chosen.items()}

    return work


def _keep(options: KeepSection) -> Work:
    bounds = {name: (low, high) for name, (low, high) in options.signals.items()}
    known: dict[str, Signal] = {**DOCUMENT, **OTHER}
    for name, file in options.lists.items():
        known |= list_signals(name, read_terms(file))

    def work(document: Any) -> Removed | None:
        view = TextViews(document.text)
        for name, (low, high) in bounds.items():
            if name.startswith(RECORD):
                value = document.metadata.get("record", {}).get(name.removeprefix(RECORD))
            else:
                value = known[name](view)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if not options.undefined:
                    return Removed(f"{name} is undefined")
            elif not low <= value <= high:
                side = "below" if value < low else "above"
                return Removed(f"{name} {side} {low if value < low else high:g}", f"{value:g}")
        return None

    return work


SIGNALS = StageKind(SignalsSection, work=_annotate, rules=_signal_rules)
KEEP = StageKind(KeepSection, work=_keep, rules=_keep_rules, files=lambda options: options.lists.values())
