"""Signals of quality as annotations, and thresholds over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.config.problems import Problem
from megatron.config.section import Section, key
from megatron.config.source.structure import nearest

from ..signals import DOCUMENT, LINES, TextViews
from .contract import Removed, StageKind, Work

RECORD = "record."  # before the key of an input record, whose number is a signal too


class SignalsSection(Section):
    names: list[str] = key(list, "Signals that are stored with each document. Empty: all.")


class KeepSection(Section):
    signals: dict[str, list[float]] = key(
        ..., "Signal -> [least, most]. A document is kept if all its values lie within, bounds included."
    )
    undefined: bool = key(False, "Keep a document that has no value of a signal.")


def _known(names: Iterable[str], path: str, where: str) -> Iterable[Problem]:
    for name in names:
        if name not in DOCUMENT and name not in LINES and not name.startswith(RECORD):
            rule = f"{path} must name signals of docs/curation.md, or {RECORD}KEY for a number of the input record"
            yield Problem(
                f"{path}.{name}", rule, nearest(name, [*DOCUMENT, *LINES]) or "see the table there", where=where
            )


def _signal_rules(options: SignalsSection, path: str, where: str) -> Iterable[Problem]:
    return _known(options.names, f"{path}.names", where)


def _keep_rules(options: KeepSection, path: str, where: str) -> Iterable[Problem]:
    yield from _known(options.signals, f"{path}.signals", where)
    for name, bounds in options.signals.items():
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            rule = f"{path}.signals.{name} must be [least, most], with least at most as large as most"
            yield Problem(f"{path}.signals.{name}", rule, "write two numbers, as in [0, 0.3]", list(bounds), where)
        if name in LINES:
            rule = f"{path}.signals must name signals of documents, and {name} has one value per line"
            yield Problem(f"{path}.signals.{name}", rule, "use a signal of documents", list(bounds), where)


def _annotate(options: SignalsSection) -> Work:
    names = options.names or [*DOCUMENT, *LINES]

    def work(document: Any) -> None:
        view = TextViews(document.text)
        document.metadata["signals"] = {name: ({**DOCUMENT, **LINES}[name])(view) for name in names}

    return work


def _keep(options: KeepSection) -> Work:
    bounds = {name: (low, high) for name, (low, high) in options.signals.items()}

    def work(document: Any) -> Removed | None:
        view = TextViews(document.text)
        for name, (low, high) in bounds.items():
            if name.startswith(RECORD):
                value = document.metadata.get("record", {}).get(name.removeprefix(RECORD))
            else:
                value = DOCUMENT[name](view)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if not options.undefined:
                    return Removed(f"{name} is undefined")
            elif not low <= value <= high:
                side = "below" if value < low else "above"
                return Removed(f"{name} {side} {low if value < low else high:g}", f"{value:g}")
        return None

    return work


SIGNALS = StageKind(SignalsSection, work=_annotate, rules=_signal_rules)
KEEP = StageKind(KeepSection, work=_keep, rules=_keep_rules)
