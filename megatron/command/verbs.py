"""The verbs of `deepy`: every script of tools/ is a verb, or a verb of its folder's group, and so is every measurement
of bench/.

A new tool needs no registration. Its help is the first sentence of its docstring."""

import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..installation import installed, root

# Scripts that the launcher starts on all ranks. Each is a verb where the file exists.
LAUNCHED = {
    "train": "train a model: deepy train [options] a.yml b.yml ... key.path=value ...",
    "align": "train by reinforcement learning: deepy align [options] a.yml b.yml ... key.path=value ...",
    "evaluate": "score a checkpoint: deepy evaluate [options] a.yml ... --tasks NAME,...",
    "extract": "find training sequences that a checkpoint recites: deepy extract [options] a.yml ...",
}
# Options of the launcher that ask about a run. Each is a verb where the launcher has the option.
QUESTIONS = {
    "status": "show what a running job is doing: deepy status RUN",
    "stacks": "show where every rank of a running job is: deepy stacks RUN",
    "logs": "show the ranks' log files of a run, merged by time: deepy logs RUN",
}
GROUPS = {
    "adapter": "merge adapters, and exchange them with peft",
    "bench": "measure speed and memory",
    "checkpoint": "inspect, compare, convert and export checkpoints",
    "data": "make token files from texts, and show which data a run reads",
    "moe": "inspect mixtures of experts",
    "peers": "make keys for runs that train together, and serve their folder (deepy status RUN shows the peers)",
}
# Tools that work on the repository itself: they are no verbs of an installed package.
REPOSITORY = ("quickstart", "continual", "canaries", "support-table", "bench")
_SENTENCE = re.compile(r'^(?:#![^\n]*\n)?"""(.+?)(?:\.?"""|\.\s|\n\n)', re.DOTALL)


@dataclass(frozen=True)
class Verb:
    """One thing that `deepy` does."""

    words: tuple[str, ...]  # how it is called, `("data", "tokenize")`
    help: str  # one line
    script: Path | None = None  # the file that does it, if it is run unchanged
    launch: Path | None = None  # the script that the launcher starts on every rank, or
    question: str | None = None  # the launcher's option that answers
    before: tuple[str, ...] = ()  # words that the script gets before the command line's

    @property
    def name(self) -> str:
        return " ".join(self.words)


def verbs() -> list[Verb]:
    """All verbs, in the order in which the help shows them: runs first, then tools, then groups."""
    return [*_runs(), *_tools()]


def execute(script: Path, name: str, words: list[str]) -> None:
    """Run a script in this process as Python would, under the name that its help is to show.

    Raises:
        SystemExit: what the script ends with.
    """
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main  # worker processes look there for what the script defines
    sys.argv = [f"deepy {name}", *words]
    sys.path.insert(0, str(script.parent))
    exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)


def find(words: Sequence[str]) -> Verb | None:
    """The verb that a command line begins with."""
    by_words = {verb.words: verb for verb in verbs()}
    plain = tuple(word.replace("_", "-") for word in words[:2])
    return by_words.get(plain[:1]) or by_words.get(plain)


def group(name: str) -> list[Verb]:
    """The verbs of a group, such as `data`. Empty if there is no such group."""
    return [verb for verb in verbs() if len(verb.words) == 2 and verb.words[0] == name]


def _runs() -> list[Verb]:
    from ..launch.options import parser

    top, options = root(), parser().format_help()
    found = [Verb((n,), text, launch=top / f"{n}.py") for n, text in LAUNCHED.items() if (top / f"{n}.py").is_file()]
    if (top / "generate.py").is_file():
        text = "continue texts with a model: deepy generate RUN --prompt TEXT"
        found.append(Verb(("generate",), text, script=top / "generate.py"))
    asked = {name: text for name, text in QUESTIONS.items() if f"--{name} " in options}
    return found + [Verb((name,), text, question=f"--{name}") for name, text in asked.items()]


def _tools() -> list[Verb]:
    tools, bench = root() / "tools", root() / "bench"
    found = [_tool(path, path.relative_to(tools).parts) for path in sorted(tools.glob("*.py"))]
    measured = sorted([*bench.glob("[!_]*.py"), *bench.glob("*/*.py")], key=lambda path: path.name)
    found += [_tool(path, ("bench", path.name)) for path in measured]
    found += [_tool(path, path.relative_to(tools).parts) for path in sorted(tools.glob("*/*.py"))]
    return [verb for verb in found if verb is not None]


def _tool(path: Path, parts: Sequence[str]) -> Verb | None:
    """The verb of a file of tools/ or bench/. None for modules that others import, and for the repository's tools."""
    text = path.read_text(encoding="utf-8")
    words = tuple(part.removesuffix(".py").replace("_", "-") for part in parts)
    about = _SENTENCE.match(text)
    if words[0] == "bench" and about is not None and "\ndef options(" in text:
        runner = root() / "bench" / "__main__.py"
        return Verb(words, _lowered(" ".join(about[1].split())), script=runner, before=words[1:])
    runs = 'if __name__ == "__main__":' in text and re.search(r"\b(sys\.exit|leave_process)\(", text)
    if not runs or about is None or (installed() and words[0] in REPOSITORY):
        return None
    return Verb(words, _lowered(" ".join(about[1].split())), script=path)


def _lowered(sentence: str) -> str:
    """A sentence as a phrase of a list."""
    return sentence[0].lower() + sentence[1:] if sentence[1:2].islower() or sentence[1:2] == " " else sentence
