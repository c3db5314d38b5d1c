"""The console command `deepy`: find the verb, and run what stands behind it in this process.

Neither torch nor DeepSpeed is loaded here. A verb behaves as its script does: the same options, output and exit status.
"""

import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from .verbs import GROUPS, Verb, execute, find, group, verbs

WRONG = 2  # exit status of a mistake on the command line
USAGE = "deepy VERB [options] ...        deepy VERB --help shows a verb's options"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `deepy` with these words (default: the command line's) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        from .completion import complete

        return complete()
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else WRONG
    if words[0] in ("-V", "--version", "version"):
        from .. import __version__

        print(f"deepy {__version__}")
        return 0
    if words[0] == "completion":
        from .completion import script

        return script(words[1:])
    verb = find(words)
    if verb is None:
        return _unknown(words)
    return run(verb, words[len(verb.words) :])


def run(verb: Verb, words: list[str]) -> int:
    """Run a verb with what follows it on the command line."""
    if verb.launch:
        from ..launch.command_line import main as launch

        return launch(words, script=str(verb.launch))
    if verb.question:
        from ..launch.command_line import main as launch

        if words[:1] in (["-h"], ["--help"]):
            about = verb.help.partition(":")[0]
            print(f"usage: deepy {verb.name} RUN\n\n{about[0].upper()}{about[1:]}.")
            return 0
        return launch([verb.question, *words])
    assert verb.script is not None
    try:
        execute(verb.script, verb.name, [*verb.before, *words])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def overview() -> str:
    """The help of the whole command."""
    found = verbs()
    width = 2 + max(len(verb.words[-1]) for verb in found)
    lines = [f"usage: {USAGE}", "", "Train language models: one YAML in, a model out, on any parallel layout.", ""]
    lines += [_row(verb.name, verb.help, width) for verb in found if len(verb.words) == 1]
    for name in dict.fromkeys(verb.words[0] for verb in found if len(verb.words) == 2):
        lines += ["", f"{name}: {GROUPS.get(name, 'tools')}"]
        lines += [_row(verb.words[1], verb.help, width) for verb in group(name)]
    lines += ["", _row("completion", "print a script that completes `deepy` in bash, zsh or fish", width)]
    lines += ["", "A configuration is a file, or the name of a ready one: deepy train pythia/70m training.steps=10"]
    return "\n".join(lines)


def _row(name: str, text: str, width: int) -> str:
    columns = max(60, shutil.get_terminal_size((120, 24)).columns)
    return f"  {name:{width}}{textwrap.shorten(text, columns - width - 2, placeholder=' ...')}"


def _unknown(words: list[str]) -> int:
    inside = group(words[0])
    if inside:
        if words[1:2] and words[1] not in ("-h", "--help"):
            names = [verb.words[1] for verb in inside]
            print(f"deepy {words[0]}: no verb {words[1]!r}{_meant(words[1], names)}", file=sys.stderr)
            return WRONG
        width = 2 + max(len(verb.words[1]) for verb in inside)
        rows = [_row(verb.words[1], verb.help, width) for verb in inside]
        asked = len(words) > 1
        print("\n".join([f"usage: deepy {words[0]} VERB [options] ...", "", *rows]), file=None if asked else sys.stderr)
        return 0 if asked else WRONG
    names = list(dict.fromkeys(verb.words[0] for verb in verbs()))
    meant = _meant(words[0], names)
    print(f"deepy: no verb {words[0]!r}{meant} (`deepy --help` lists all of them)", file=sys.stderr)
    return WRONG


def _meant(word: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, names, n=1)
    return f": did you mean {near[0]!r}?" if near else f": choose from {', '.join(names)}"
