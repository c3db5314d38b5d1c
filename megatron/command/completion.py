"""Completion of `deepy` in bash, zsh and fish, by argcomplete.

The shell asks `deepy` itself for what may come next, so verbs, options, configurations and keys match the installed
version."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

from ..installation import configuration_names
from .verbs import Verb, execute, find, verbs

SHELLS = ("bash", "zsh", "fish")


def script(words: list[str]) -> int:
    """Print what a shell must read so that it completes `deepy`."""
    if words[:1] == [] or words[0] not in SHELLS or len(words) > 1:
        print(
            "usage: deepy completion bash|zsh|fish\n\n"
            '  bash, zsh   eval "$(deepy completion bash)"        in ~/.bashrc or ~/.zshrc, with the shell\'s name\n'
            "  fish        deepy completion fish | source         in ~/.config/fish/config.fish",
            file=sys.stdout if words[:1] in (["-h"], ["--help"]) else sys.stderr,
        )
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    from argcomplete.shell_integration import shellcode

    print(shellcode(["deepy"], shell=words[0]))
    return 0


def complete() -> int:
    """Answer the shell: what may stand where the cursor is. Never returns: argcomplete ends the process."""
    import argcomplete

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    typed = _words(line.encode()[:point].decode(errors="ignore"))
    verb = find(typed[1:-1])  # the last word is the one being typed
    if verb is None:
        argcomplete.autocomplete(_verb_parser())
        return 0
    os.environ["_ARGCOMPLETE"] = str(1 + len(verb.words))  # the words that stand for the program
    _complete_verb(verb)
    return 0


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = text.split()
    return [*words, ""] if text[-1:].isspace() else words


def _verb_parser() -> argparse.ArgumentParser:
    """A parser that knows the verbs and nothing behind them."""
    parser = argparse.ArgumentParser(prog="deepy")
    parser.add_argument("--version", action="store_true", help="print the version")
    first = parser.add_subparsers()
    groups: dict[str, argparse._SubParsersAction] = {}
    for verb in verbs():
        if len(verb.words) == 1:
            first.add_parser(verb.name, help=verb.help)
            continue
        name, inner = verb.words
        if name not in groups:
            groups[name] = first.add_parser(name).add_subparsers()
        groups[name].add_parser(inner, help=verb.help)
    shells = first.add_parser("completion", help="print the completion script of a shell")
    shells.add_argument("shell", choices=SHELLS)
    return parser


def _complete_verb(verb: Verb) -> None:
    import argcomplete

    if verb.script is None:
        from ..launch.options import parser

        argcomplete.autocomplete(
            parser(str(verb.launch) if verb.launch else None), default_completer=cast(Any, candidates)
        )
        return
    with _answering():
        execute(verb.script, verb.name, list(verb.before))


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """While this holds, the first parser that is to parse the command line answers the shell instead."""
    import argcomplete

    with contextlib.ExitStack() as stack:

        def answer(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
            stack.close()  # argcomplete parses what is typed with the parser's own methods
            argcomplete.autocomplete(self, default_completer=cast(Any, candidates))

        for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, answer))
        yield


def candidates(prefix: str, **_: object) -> list[str]:
    """Completions of an argument without choices: a file, the name of a ready configuration, or a key with its `=`."""
    from argcomplete.completers import FilesCompleter

    files = list(FilesCompleter()(prefix))
    return [*files, *(name for name in [*configuration_names(), *_keys()] if name.startswith(prefix) and prefix)]


def _keys() -> list[str]:
    from ..config.schema import catalog

    return [f"{key.name}=" for key in catalog().values() if not key.section]
