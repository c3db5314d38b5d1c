"""The hosts of a run: a hostfile, with hosts included or excluded."""

from __future__ import annotations

import re
from pathlib import Path

from ..wire.specification import Host

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # what ssh, pdsh and a log can all take as it is

MOST_SLOTS = 4096  # ranks of one host (the largest have a few hundred processors)


class HostError(ValueError):
    """A list of hosts that cannot be right."""


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file with one `name slots=N` per line. `#` starts a comment.

    A missing file is an error: a start on only this machine was not asked for.

    Raises:
        HostError: no such file, or lines that are wrong: all of them at once, with their numbers.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise HostError(f"launch.hostfile: {path}: {error.strerror}") from error
    hosts: list[Host] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            if any(host.name == other.name for other in hosts):
                raise HostError(f"host {host.name} is there twice")
            hosts.append(host)
        except HostError as error:
            problems.append(f"{path}:{number}: {error}")
    if not hosts and not problems:
        problems.append(f"{path}: no host in it: write one `name slots=N` per line")
    if problems:
        raise HostError("\n".join(problems))
    return hosts


def _host(words: list[str]) -> Host:
    name, *options = words
    if not _NAME.fullmatch(name):
        raise HostError(f"{name!r} is not a host name")
    if len(options) != 1 or not re.fullmatch(r"slots=[1-9]\d*", options[0]):
        raise HostError(
            f"after {name} there must be `slots=N` and nothing else, not {' '.join(options) or 'nothing'!r}"
        )
    count = options[0][6:]
    if len(count) > 9 or int(count) > MOST_SLOTS:
        raise HostError(f"{name} has {count[:20]} slots, and must have at most {MOST_SLOTS}, one for each rank")
    return Host(name, tuple(range(int(count))))


def select(hosts: list[Host], include: str | None = None, exclude: str | None = None) -> list[Host]:
    """The hosts and slots that remain, in DeepSpeed's syntax: `name@name:0,2` (parts joined by `@`).

    Args:
        hosts: all hosts.
        include: use these hosts or slots only, in their order in `hosts`.
        exclude: without these.

    Raises:
        HostError: both are given, a name or slot is unknown, or nothing remains.
    """
    if include and exclude:
        raise HostError("launch.include and launch.exclude cannot be given together: one of them says it all")
    key, text = ("launch.include", include) if include else ("launch.exclude", exclude)
    if not text:
        return hosts
    named = _named(hosts, text, key)
    remaining = []
    for host in hosts:
        if include:
            slots = named.get(host.name, ())
        else:
            slots = tuple(slot for slot in host.slots if slot not in named.get(host.name, ()))
        if slots:
            remaining.append(Host(host.name, slots))
    if not remaining:
        raise HostError(f"{key} {text!r} leaves no host")
    return remaining


def _named(hosts: list[Host], text: str, key: str) -> dict[str, tuple[int, ...]]:
    """Slots by host name, of `name`, or `name:slot,slot`, joined by `@`."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "")
        if name not in known:
            raise HostError(
                f"{key}: no host {name!r}. There are {', '.join(list(known)[:8])}{' ...' if len(known) > 8 else ''}"
            )
        if not colon:
            chosen = known[name].slots
        elif re.fullmatch(r"\d+(,\d+)*", slots):
            chosen = tuple(sorted({int(slot) for slot in slots.split(",")}))
        else:
            raise HostError(f"{key}: {part!r} must be a host, or a host and slots as in name:0,2")
        wrong = [slot for slot in chosen if slot not in known[name].slots]
        if wrong:
            raise HostError(
                f"{key}: host {name} has no slot {wrong[0]}. It has {len(known[name].slots)}, counted from 0"
            )
        found[name] = tuple(sorted({*found.get(name, ()), *chosen}))
    return found
