"""Every `deepy VERB ...` of pages, examples, configurations, docstrings and messages is one that the command takes.

Each is parsed by the verb's own parser, in this process, up to where its work would begin.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from megatron.command.verbs import Verb, execute, find, group
from megatron.config.schema import type_at
from megatron.config.source.arguments import split
from megatron.installation import configuration_file
from megatron.launch.command_line import _options_first, _refuse_unread
from megatron.launch.options import parser as launcher_parser
from tests.paths import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
PAGES += sorted(
    str(path.relative_to(ROOT)) for top in ("examples", "eval_tasks") for path in ROOT.glob(f"{top}/**/*.md")
)
OWN = ("--help", "--version", "completion", "VERB")
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"(?<!`)`(deepy\s[^`]+)`")
LINE = re.compile(r"^[#$ ]*(?:[A-Z_]+=\S+ |salloc [^\n]*?)?(deepy (?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
BARE = re.compile(r"(?<![\w./`-])deepy ([a-z][\w-]+)(?: ([a-z][\w-]*))?")
# "deepy" is also the project's name, and begins the names of formats.
NO_VERBS = {"has", "in", "is", "itself", "loki", "needs", "or", "peers", "with"}
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("runs", "data", "build")}


class Parsed(BaseException):
    """A verb's parser has taken the command line: its work would begin here."""


class Refused(Exception):
    """A verb's parser has refused the command line."""


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Commands of a page, and whether each is all that a reader types (in a block), or named in a sentence."""
    for block in FENCE.findall(text):
        yield from ((command, True) for command in LINE.findall(block))
    text = FENCE.sub("", text)
    yield from (
        (command, True) for line in re.findall(r"^    .*$", text, re.MULTILINE) for command in LINE.findall(line)
    )
    yield from ((" ".join(command.split()), False) for command in QUOTED.findall(text))


def words(command: str) -> list[str]:
    """The words of a command without what explains it: a comment, a description to its right, brackets, a pipe."""
    command = re.sub(r"\\\n\s*", "", command)
    command = re.split(r"\s#\s|\s{2,}(?=\S)|\s[|>&]|;", command)[0]
    command = re.sub(r"\[(options|RUN|-[^\]]*|key\.path=value \.\.\.|[\w/]+ \.\.\.)\]", r" \1 ", command)
    command = re.sub(r"(?<=\s)options(?=\s)|key\.path=value|(?<=\s)\.\.\.(?=\s|$)|\.\.\.(?=\s|$)|<|>", "", command)
    return [word.rstrip(",") for word in shlex.split(command)][1:]


def parsed(given: list[str], *, whole: bool) -> None:
    """Have the verb parse these words.

    Raises:
        Refused: it does not take them.
    """
    verb = find(given)
    if verb is None:
        if (given and given[0] in OWN) or (len(given) == 1 and group(given[0])):
            return
        raise Refused(f"no verb {' '.join(given[:2])}")
    rest = given[len(verb.words) :]
    if rest == ["--help"]:
        return
    if verb.launch:
        _launched(verb, rest, whole)
    elif verb.script is not None:
        _tool(verb, rest, whole)
    elif len(rest) != 1 and whole:
        raise Refused(f"deepy {verb.name} takes a run")


def _launched(verb: Verb, rest: list[str], whole: bool) -> None:
    with _stopped(whole):
        options = launcher_parser(str(verb.launch)).parse_args(_options_first(rest))
        _refuse_unread(options)
    if options.conf_dir:  # GPT-NeoX's form, whose names are in that folder
        return
    taken = split(options.words)
    if whole and not taken.files:
        raise Refused("no configuration")
    _names(list(taken.files))
    _keys(list(taken.overrides))
    if verb.name in ("evaluate", "extract") and taken.own:
        from megatron.evaluation.arguments import parser as evaluate
        from megatron.evaluation.memorisation.arguments import parser as extract

        with _stopped(whole):
            (evaluate if verb.name == "evaluate" else extract)().parse_args(list(taken.own))
    elif taken.own:
        raise Refused(f"{verb.name} reads no {' '.join(taken.own)}")


def _tool(verb: Verb, rest: list[str], whole: bool) -> None:
    if not rest and not whole:
        return
    assert verb.script is not None
    if not whole and len(rest) == 1 and rest[0] in ("show", "explain", "check", "layers", "schedule", "convert"):
        return  # a question of `deepy config` that is named
    if "parse" not in verb.script.read_text(encoding="utf-8") and not verb.before:
        return  # it has no options
    path, main, argv = list(sys.path), sys.modules["__main__"], sys.argv
    try:
        with _stopped(whole, end=True):
            execute(verb.script, verb.name, [*verb.before, *rest])
    except Parsed as stop:
        options = vars(stop.args[0])
    else:
        raise Refused("nothing was parsed")
    finally:
        sys.path[:], sys.modules["__main__"], sys.argv = path, main, argv
        _forget()
    if verb.name in ("config", "plan", "communication", "chaos", "verify-resume"):
        found = [*(options.get("arguments") or ()), *(options.get("words") or ())]
        _keys([word for word in found if "=" in word])


def _forget() -> None:
    """Drop modules of a tool's own folder: modules of another folder may have the same names."""
    for name, module in list(sys.modules.items()):
        if "." not in name and (getattr(module, "__file__", None) or "").startswith(f"{ROOT / 'tools'}{os.sep}"):
            del sys.modules[name]


def _names(files: list[str]) -> None:
    for name in files:
        top, _, inner = name.partition("/")
        ours = top in FOLDERS and inner
        if (ours or "." not in name) and not PLACEHOLDER.fullmatch(name) and configuration_file(str(name)) is None:
            raise Refused(f"no configuration {name}")


def _keys(overrides: list[str]) -> None:
    for each in overrides:
        key = each.partition("=")[0]
        if type_at(tuple(key.split("."))) is None:
            raise Refused(f"no key {key}")


@contextlib.contextmanager
def _stopped(whole: bool, end: bool = False) -> Iterator[None]:
    """Within it a parser raises `Refused` in place of ending the process and, with `end`, `Parsed` once it is done."""
    original = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_known_args", "_get_value")}
    original |= {"parse_args": argparse.ArgumentParser.parse_args, "_check_value": argparse.ArgumentParser._check_value}
    original["parse_intermixed_args"] = argparse.ArgumentParser.parse_intermixed_args
    inside = []

    def taken(name: str) -> Any:
        def parse(self: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
            outermost = not inside
            inside.append(name)
            try:
                if not whole:
                    for action in self._actions:
                        action.required = False
                result = original[name](self, *given, **more)
            finally:
                inside.pop()
            if outermost and end:
                options, rest = result if isinstance(result, tuple) else (result, [])
                if any(word.startswith("-") for word in rest):
                    raise Refused(f"unrecognized arguments: {' '.join(rest)}")
                raise Parsed(argparse.Namespace(**{**vars(options), "words": rest}))
            return result

        return parse

    def value(self: argparse.ArgumentParser, action: argparse.Action, text: str) -> Any:
        """A value. The name of one, such as N, stands for any."""
        return text if PLACEHOLDER.fullmatch(text) else original["_get_value"](self, action, text)

    def check(self: argparse.ArgumentParser, action: argparse.Action, chosen: Any) -> None:
        if not (isinstance(chosen, str) and PLACEHOLDER.fullmatch(chosen)):
            original["_check_value"](self, action, chosen)

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        if not whole and message.endswith("expected one argument"):  # an option that a sentence names
            raise Parsed(argparse.Namespace())
        raise Refused(message)

    with contextlib.ExitStack() as stack:
        for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, taken(name)))
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "_get_value", value))
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "_check_value", check))
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "error", refuse))
        yield


def refusal(command: str, whole: bool) -> str | None:
    """Why the command does not take a line. None: it does."""
    try:
        given = words(command)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            parsed(given, whole=whole)
    except (Exception, SystemExit) as error:
        return f"{' '.join(command.split())}\n    {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page):
    wrong = [refusal(*each) for each in commands((ROOT / page).read_text(encoding="utf-8"))]
    assert not list(filter(None, wrong)), "\n".join(filter(None, wrong))


CODE = sorted({str(path.relative_to(ROOT)) for top in ("megatron", "tools") for path in ROOT.glob(f"{top}/**/*.py")})
CODE += sorted(str(path.relative_to(ROOT)) for top in ("configs", "examples") for path in ROOT.glob(f"{top}/**/*.yml"))


def test_commands_of_docstrings_messages_and_comments():
    where: dict[tuple[str, str], str] = {}
    for name in CODE:
        text = (ROOT / name).read_text(encoding="utf-8")
        quoted = [(*command.split()[1:3], "")[:2] for command in QUOTED.findall(text)]
        where |= dict.fromkeys([*BARE.findall(text), *quoted], name)
    wrong = []
    for (first, second), name in where.items():
        if group(first):
            known = not second or find([first, second]) is not None
        else:
            known = first in NO_VERBS or first in OWN or find([first]) is not None
        if not known:
            wrong.append(f"{name}: deepy {first} {second}")
    assert not wrong, "\n".join(wrong)


def test_wrong_commands_are_found():
    for command in (
        "deepy trian my.yml",
        "deepy import model",
        "deepy --ranks 4 evaluate my.yml",
        "deepy train my.yml parallel.tensors=2",
        "deepy train pythia/71m",
        "deepy train --nodes 2 my.yml",
        "deepy data tokenize --inputs texts --output data/mine",
        "deepy evaluate my.yml --task piqa",
        "deepy config check my.yml training.step=3",
        "deepy status",
    ):
        assert refusal(command, True), command
