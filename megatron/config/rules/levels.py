"""Levels of checkpoints: copies that can be made, and found again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.output import RUN_NAME, LevelSection
from .check import Check

_IN_URLS = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._~-]*")  # no letters that URLs quote, and no parent folder


def levels_have_their_keys(context: RuleContext) -> Iterator[Problem]:
    for number, level in enumerate(context.config.checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.every != "auto" and level.every < 1:
            yield context.problem(f"{at}.every", rule="must be at least 1, or auto", fix="use 1")
        if level.keep != "all" and level.keep < 1:
            yield context.problem(f"{at}.keep", rule="must be at least 1", fix="use 1")
        if level.place == "store":
            for name in (name for name in ("path", "neighbours") if getattr(level, name)):
                fix = "remove it" + (". A folder is a URL too: url: file:///folder" if name == "path" else "")
                rule = "must be absent with place: store, which has no hosts"
                yield context.problem(f"{at}.{name} {at}.place", rule=rule, fix=fix)
            continue
        if level.keep == "all":
            rule = "must be a number on hosts, which all saves would fill"
            yield context.problem(f"{at}.keep {at}.place", rule=rule, fix="use 2")
        if level.url is not None:
            fix = "use place: store, or remove it"
            yield context.problem(f"{at}.url {at}.place", rule="must go with place: store", fix=fix)


def hosts_have_a_place(context: RuleContext) -> Iterator[Problem]:
    checkpoint, seen = context.config.checkpoint, dict[tuple[str, str | None], int]()
    for number, level in enumerate(checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.place == "store":
            continue
        if level.place == "disk" and level.path is None:
            fix = "give a folder of each host's own disk"
            yield context.problem(f"{at}.path {at}.place", rule="a disk must have a path", fix=fix)
        if level.path is not None and not level.path.startswith("/"):
            yield context.problem(
                f"{at}.path",
                rule="must be an absolute path: ranks start in one folder that all hosts share",
                fix="begin it with /. The word {host} in it stands for the host's name",
            )
        if level.every != "auto" and checkpoint.every and level.every >= checkpoint.every:
            yield context.warning(
                f"{at}.every checkpoint.every",
                rule="must be below checkpoint.every: a copy that is saved less often is never the newest",
                fix=f"use {max(checkpoint.every // 10, 1)}",
            )
        if (level.title, level.path) in seen:
            rule = f"must not be the folder of another level, {seen[level.title, level.path]}"
            yield context.problem(f"{at}.path", rule=rule, fix="remove one of them, or give it another path")
        seen[level.title, level.path] = number


def stores_have_a_url(context: RuleContext) -> Iterator[Problem]:
    levels, name = context.config.checkpoint.levels, context.config.run.name
    stores = [number for number, level in enumerate(levels) if level.place == "store"]
    for number in stores[1:]:
        yield context.problem(
            f"checkpoint.levels.{number}.place",
            rule=f"must be the only store, and level {stores[0]} is one",
            fix="remove one of them, since stores replicate themselves",
        )
    for number in stores:
        wrong = _wrong_url(context, f"checkpoint.levels.{number}", levels[number], name or "")
        if wrong is not None:
            yield wrong


def _wrong_url(context: RuleContext, at: str, level: LevelSection, name: str) -> Problem | None:
    if level.url is None or "://" not in level.url:
        fix = "use s3://bucket/{run.name}, or file:///folder/{run.name}"
        return context.problem(f"{at}.url {at}.place", rule="a store must have a URL", fix=fix)
    if context.named_store and not _IN_URLS.fullmatch(name):
        return context.problem(
            f"run.name {at}.url",
            rule=f"must be letters, digits and . _ ~ - after a letter or digit, without .., for {RUN_NAME} in a URL",
            fix=f"use another name, or write the URL without {RUN_NAME}",
        )
    if set(level.url) & set("{}"):
        rule = f"must be a URL, in which only {RUN_NAME} may stand in braces"
        return context.problem(f"{at}.url", rule=rule, fix=f"use {RUN_NAME}, or remove the braces")
    return None


def neighbours_are_there(context: RuleContext) -> Iterator[Problem]:
    """Where the hosts are not known yet, the run itself checks."""
    for number, level in enumerate(context.config.checkpoint.levels):
        if level.neighbours and level.place != "store" and context.starts_here:
            yield context.problem(
                f"checkpoint.levels.{number}.neighbours",
                rule="must be fewer than the hosts, and this run has one",
                fix="use neighbours: 0, or start it on several hosts (launch.hostfile)",
            )


CHECKS = (
    Check(
        "checkpoint.optimizer_state",
        lambda c: c.checkpoint.near and not c.checkpoint.optimizer_state,
        "must be true with levels on hosts: a restart begins from them",
        "use optimizer_state: true, or remove these levels",
    ),
)
INPUT_RULES = (neighbours_are_there,)
