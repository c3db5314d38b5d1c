"""Levels of checkpoints: which copies can be made, and be found again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.output import RUN_NAME, LevelSection

_IN_URLS = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._~-]*")  # nothing that URLs quote, or that leads elsewhere


def numbers_are_possible(context: RuleContext) -> Iterator[Problem]:
    for number, level in enumerate(context.config.checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.every != "auto" and level.every < 1:
            yield context.problem(f"{at}.every", rule="must be at least 1, or auto", fix="use 1")
        if level.keep != "all" and level.keep < 1:
            yield context.problem(f"{at}.keep", rule="must be at least 1", fix="use 1")
        if level.keep == "all" and level.place != "store":
            yield context.problem(
                f"{at}.keep", f"{at}.place", rule="must be a number on hosts, which all saves would fill", fix="use 2"
            )


def hosts_have_a_place(context: RuleContext) -> Iterator[Problem]:
    checkpoint, seen = context.config.checkpoint, dict[tuple[str, str | None], int]()
    for number, level in enumerate(checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.place == "store":
            continue
        if level.place == "disk" and level.path is None:
            yield context.problem(
                f"{at}.path", f"{at}.place", rule="a disk must have a path", fix="give a folder of each host's own disk"
            )
        if level.path is not None and not level.path.startswith("/"):
            yield context.problem(
                f"{at}.path",
                rule="must be an absolute path: ranks start in one folder that all hosts share",
                fix="begin it with /; {host} in it stands for the host's name",
            )
        if level.every != "auto" and checkpoint.every and level.every >= checkpoint.every:
            yield context.warning(
                f"{at}.every",
                "checkpoint.every",
                rule="must be below checkpoint.every: what is saved less often is never the newest",
                fix=f"use {max(checkpoint.every // 10, 1)}",
            )
        if (level.title, level.path) in seen:
            yield context.problem(
                f"{at}.path",
                rule=f"must not be the folder of another level, {seen[level.title, level.path]}",
                fix="remove one of them, or give it another path",
            )
        seen[level.title, level.path] = number
    if checkpoint.near and not checkpoint.optimizer_state:
        yield context.problem(
            "checkpoint.optimizer_state",
            rule="must be true with levels on hosts: a restart begins from them",
            fix="use optimizer_state: true, or leave these levels out",
        )


def keys_are_of_the_place(context: RuleContext) -> Iterator[Problem]:
    """What a level has must mean something where it is."""
    for number, level in enumerate(context.config.checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        wrong = [name for name in ("path", "neighbours") if getattr(level, name)] if level.place == "store" else []
        for name in wrong:
            yield context.problem(
                f"{at}.{name}",
                f"{at}.place",
                rule="must be left out with place: store, which has no hosts",
                fix="leave it out; a folder is a URL too: url: file:///folder" if name == "path" else "leave it out",
            )
        if level.place != "store" and level.url is not None:
            yield context.problem(
                f"{at}.url", f"{at}.place", rule="must go with place: store", fix="use place: store, or leave it out"
            )


def stores_have_a_url(context: RuleContext) -> Iterator[Problem]:
    levels, name = context.config.checkpoint.levels, context.config.run.name
    stores = [number for number, level in enumerate(levels) if level.place == "store"]
    for number in stores[1:]:
        yield context.problem(
            f"checkpoint.levels.{number}.place",
            rule=f"must be the only store; level {stores[0]} is one",
            fix="leave one of them out; stores have replication of their own",
        )
    for number in stores:
        wrong = _wrong_url(context, f"checkpoint.levels.{number}.url", levels[number], name or "")
        if wrong is not None:
            yield wrong


def _wrong_url(context: RuleContext, at: str, level: LevelSection, name: str) -> Problem | None:
    if level.url is None or "://" not in level.url:
        place = at.replace(".url", ".place")
        return context.problem(
            at, place, rule="a store must have a URL", fix="use s3://bucket/{run.name}, or file:///folder/{run.name}"
        )
    if context.named_store and not _IN_URLS.fullmatch(name):
        return context.problem(
            "run.name",
            at,
            rule=f"must be letters, digits and . _ ~ - after a letter or digit, without .., for {RUN_NAME} in a URL",
            fix=f"use another name, or write the URL without {RUN_NAME}",
        )
    if set(level.url) & set("{}"):
        return context.problem(
            at,
            rule=f"must be a URL, in which only {RUN_NAME} may stand in braces",
            fix=f"use {RUN_NAME}, or leave the braces out",
        )
    return None


def neighbours_are_there(context: RuleContext) -> Iterator[Problem]:
    """Where the hosts are not known yet, the run itself looks."""
    for number, level in enumerate(context.config.checkpoint.levels):
        if level.neighbours and level.place != "store" and context.starts_here:
            yield context.problem(
                f"checkpoint.levels.{number}.neighbours",
                rule="must be fewer than the hosts, and this run has one",
                fix="use neighbours: 0, or start it on several hosts (launch.hostfile)",
            )


INPUT_RULES = (neighbours_are_there,)
