"""Stages that change, search or rate a text by itself: runs, personal data, lists of terms, signals, thresholds."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron.config.file_access import unreadable
from megatron.config.problems import Problem
from megatron.config.section import Section, key
from megatron.config.source.structure import nearest

from ..signals import DOCUMENT, LINES, OTHER, RUNS, Signal, TextViews, collapsed, list_signals
from .contract import Removed, StageKind, Work

# Dots before an address are no part of it. It ends with its last letter, whatever follows: "a@b.org_", "a@b.org是".
EMAIL = re.compile(
    r"(?<![\w.+-])(\.*)[\w+-]+(?:\.+[\w+-]+)*\.*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63}"
)
LONGEST = 1 << 16  # length of a run that a recipe may name
IP = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)")


class CollapseSection(Section):
    runs: dict[str, int] = key(lambda: dict(RUNS), "Character -> length from which a run of it becomes one (Zyda's).")


class PiiSection(Section):
    email: str = key("email@example.com", "Replacement of an e-mail address.")
    ip: str = key("192.0.2.1", "Replacement of a public IPv4 address. Private ones stay.")


class BlocklistSection(Section):
    file: str = key(..., "File of terms, one a line, lower case.")
    least: int = key(1, "Number of different terms from which a document is removed.", ge=1)
    words: bool = key(False, "Terms must be whole words. By default they may be parts of words.")


def _collapse(options: CollapseSection) -> Work:
    change = collapsed(options.runs)

    def work(document: Any) -> None:
        document.text = change(document.text)

    return work


def _collapse_rules(options: CollapseSection, path: str, where: str) -> Iterable[Problem]:
    for character, length in options.runs.items():
        if len(character) != 1 or not 2 <= length <= LONGEST:
            rule = f"{path}.runs must give single characters a length of 2 to {LONGEST:,}"
            yield Problem(f"{path}.runs", rule, "write '-': 10, for example", {character: length}, where)


def _pii(options: PiiSection) -> Work:
    def address(match: re.Match[str]) -> str:
        try:
            return options.ip if ipaddress.ip_address(match[0]).is_global else match[0]
        except ValueError:  # a number above 255, or a leading zero
            return match[0]

    def work(document: Any) -> None:
        text = EMAIL.sub(lambda match: match[1] + options.email, document.text)
        document.text = IP.sub(address, text)

    return work


def read_terms(path: str | Path) -> list[str]:
    """The terms of a file, sorted, each once."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return sorted({each.strip().lower() for each in lines} - {""})


def _blocklist(options: BlocklistSection) -> Work:
    terms = read_terms(options.file)
    words = [re.compile(rf"(?<!\w){re.escape(each)}(?!\w)") for each in terms] if options.words else None

    def work(document: Any) -> Removed | None:
        text = document.text.lower()
        if words is None:
            found = [each for each in terms if each in text]
        else:
            found = [term for term, pattern in zip(terms, words) if pattern.search(text)]
        if len(found) < options.least:
            return None
        return Removed(f"has at least {options.least} of the terms", ", ".join(found[:10]))

    return work


def file_problem(file: str, path: str, where: str) -> Iterator[Problem]:
    """A list that a stage reads must be readable UTF-8 text with something in it."""
    why = unreadable(file)
    if why is None:
        try:
            why = None if read_terms(file) else "it has no text"
        except UnicodeDecodeError:
            why = "it is not UTF-8"
    if why:
        yield Problem(path, f"{path} must be a readable text: {why}", "check the path", file, where)


def _file_rules(options: Any, path: str, where: str) -> Iterator[Problem]:
    return file_problem(options.file, f"{path}.file", where)


class DomainsSection(Section):
    file: str = key(..., "File of domains, one a line. Their subdomains are meant too.")
    url: str = key("url", "Key of the input record that has the document's address.")


def _domains(options: DomainsSection) -> Work:
    """As RedPajama v2's `rps_doc_ut1_blacklist` and FineWeb's filter of addresses, for a list of one's own."""
    listed = frozenset(read_terms(options.file))

    def work(document: Any) -> Removed | None:
        address = document.metadata.get("record", {}).get(options.url)
        try:
            host = urlsplit(address).hostname if isinstance(address, str) else None
        except ValueError:  # brackets that are no address
            host = None
        parts = (host or "").rstrip(".").split(".")
        found = next((name for at in range(len(parts)) if (name := ".".join(parts[at:])) in listed), None)
        return Removed("its domain is listed", found) if found else None

    return work


def one_file(options: Any) -> list[str]:
    return [options.file]


COLLAPSE = StageKind(CollapseSection, work=_collapse, rules=_collapse_rules)
PII = StageKind(PiiSection, work=_pii)
BLOCKLIST = StageKind(BlocklistSection, work=_blocklist, rules=_file_rules, files=one_file)
DOMAINS = StageKind(DomainsSection, work=_domains, rules=_file_rules, files=one_file)


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
