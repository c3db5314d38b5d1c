"""YAML with the line of every key, read as YAML 1.2 reads it.

PyYAML follows YAML 1.1, where `1e-8` is text, `no` is False, `010` is 8, `1:30` is 90 and the last of two equal keys
wins in silence. Here numbers are numbers, only true and false are booleans, and what is ambiguous is a problem."""

import re
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import yaml

from ...installation import near_names
from ..problems import ABSENT, Problem
from ..schema import Path, dotted, lookup, parse_path
from ..tree import put
from .layers import ConfigSource, Origin

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    _TAG + "null": re.compile(r"^(?:~|null|Null|NULL|)$"),
    _TAG + "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    _TAG + "int": re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _TAG + "float": re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
LARGEST = 8 << 20  # bytes of a document
DEEPEST = 64  # mappings and lists inside each other (our deepest key has six)
DIGITS = 60  # of a whole number (Python refuses to print thousands of them)
MOST = 20_000  # values of a document, with repeats by aliases
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9]+$")


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the plain scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {None: list(_SCALARS.items())}

    def __init__(self, stream: str):
        super().__init__(stream)
        self.depth = self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """PyYAML's own, which calls itself for each level, as far as a document may go."""
        self.depth += 1
        self.nodes += 1
        if self.depth > DEEPEST:
            raise _TooMuch(TOO_DEEP, self.peek_event().start_mark.line + 1)
        if self.nodes > MOST:
            raise _TooMuch(TOO_MANY, self.peek_event().start_mark.line + 1)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _TooMuch(Exception):
    """A document beyond the limits. Reading it further would only cost time."""

    def __init__(self, rule_and_fix: tuple[str, str], line: int):
        self.rule_and_fix, self.line = rule_and_fix, line


RESOLVED = "# Resolved for "  # how a file begins that `resolved_file.to_yaml` has written
TOO_DEEP = (f"mappings and lists are nested at most {DEEPEST} deep", "check the brackets and the indentation here")
TOO_MANY = (
    f"a document has at most {MOST:,} values, with repeats by aliases",
    "write out what is meant without aliases of aliases, or name a folder of files in place of a long list",
)
NO_MERGE = ("YAML 1.2 has no merge key '<<'", "write the keys out, or use extends: with a file")
NO_TEXT = ("text must be Unicode, and a half of a surrogate pair is none", "write the character itself, in UTF-8")
TOO_LARGE = (f"a configuration is text of at most {LARGEST >> 20} MiB", "is this the file that is meant?")


class _Reader:
    """Turns one parsed document into values, places and problems."""

    def __init__(self, origin: Callable[[int], Origin]):
        self.origin = origin  # of a line, counted from 1
        self.places: dict[Path, Origin] = {}
        self.problems: list[Problem] = []
        self.count = 0  # of values read, aliases followed
        self.open: list[int] = []  # ids of the nodes that are being read, to find an alias inside its own anchor

    def fail(self, node: yaml.Node, path: Path, value: Any, rule: str, fix: str) -> None:
        self.problems.append(Problem(dotted(path), rule, fix, value, str(self.origin(node.start_mark.line + 1))))

    def read(self, node: yaml.Node, path: Path) -> Any:
        if id(node) in self.open:
            self.fail(node, path, ABSENT, "an alias cannot stand inside its own anchor", "write the value out")
            return None
        self.count += 1
        if self.count > MOST:
            raise _TooMuch(TOO_MANY, node.start_mark.line + 1)
        if len(self.open) >= DEEPEST:
            raise _TooMuch(TOO_DEEP, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.open.append(id(node))
        value: Any = None
        if isinstance(node, yaml.MappingNode):
            value = self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            value = self.sequence(node, path)
        self.open.pop()
        return value

    def sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            self.places[(*path, index)] = self.origin(item.start_mark.line + 1)
            values.append(self.read(item, (*path, index)))
        return values

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name, item in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                self.fail(name, path, ABSENT, "a key must be a word", "write key: value")
                continue
            key, at = name.value, (*path, name.value)
            wrong: tuple[str, str] | None = None
            if not _is_text(key):
                at, wrong = path, NO_TEXT
            elif key == "<<" and name.style is None:
                wrong = NO_MERGE
            elif key in lines:
                wrong = f"the key {key!r} is given twice, in lines {lines[key]} and {line}", "keep one of them"
            if wrong is not None:
                self.fail(name, at, ABSENT, *wrong)
                continue
            lines[key] = line
            self.places[(*path, key)] = self.origin(line)
            values[key] = self.read(item, (*path, key))
        return values

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, tag = node.value, node.tag
        if tag == _TAG + "null":
            return None
        if tag == _TAG + "bool":
            return text.lower() == "true"
        try:
            if tag == _TAG + "int":
                if len(text) > DIGITS:
                    self.fail(node, path, text, f"a number has at most {DIGITS} digits", "write a smaller number")
                    return None
                if not node.style and _LEADING_ZERO.match(text):
                    decimal = int(text)
                    self.fail(
                        node,
                        path,
                        text,
                        "a leading zero is octal in YAML 1.1 and decimal in YAML 1.2",
                        f'write {decimal}, or 0o{text.lstrip("+-0") or 0} for octal, or "{text}" in quotes for text',
                    )
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if tag == _TAG + "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self.fail(node, path, text, f"this is not a number, as its tag {tag!r} says", "remove the tag")
            return text
        if tag != _TAG + "str":
            self.fail(node, path, text, f"the tag {tag!r} has no meaning here", "remove the tag")
        if not _is_text(text):
            self.fail(node, path, text, *NO_TEXT)
        return text


def _is_text(text: str) -> bool:
    """Whether it can be written in UTF-8, as everything that a run keeps is. An escape such as "\\ud800" cannot, nor
    can an argument's byte that is no UTF-8."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def parse(text: str, origin: Callable[[int], Origin]) -> tuple[Any, dict[Path, Origin], list[Problem]]:
    """The value of one YAML document, the origin of each path, and what is wrong with it.

    Args:
        text: the document.
        origin: gives the origin of a line, counted from 1.
    """
    reader = _Reader(origin)
    if len(text) > LARGEST:
        return None, {}, [Problem("", *TOO_LARGE, ABSENT, str(origin(1)))]
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else reader.read(node, ())
    except _TooMuch as error:
        return None, {}, [Problem("", *error.rule_and_fix, ABSENT, str(origin(error.line)))]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        problem = Problem("", *_syntax(error), ABSENT, str(origin(line)))
        return None, {}, [problem]
    return value, reader.places, reader.problems


def _syntax(error: yaml.YAMLError) -> tuple[str, str]:
    reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    if "\\t" in reason or "tab" in reason:
        return "YAML is indented with spaces: there is a tab here", "replace the tab with spaces"
    if "expected a single document" in (getattr(error, "context", None) or ""):
        return "a file holds one YAML document", "remove the '---' line, or make two files"
    if "mapping values are not allowed" in reason:
        return (
            "this line has a ':' where no key can stand",
            "check the indentation of this line and the one before, or quote a text with ': '",
        )
    if "special characters are not allowed" in reason:
        return "the file has a control character", "remove it"
    context = getattr(error, "context", None)
    return f"this is not YAML: {reason}" + (f" {context}" if context else ""), "check brackets, quotes and indentation"


def read_file(path: str) -> ConfigSource:
    """A YAML file as a source. An empty file is an empty mapping. Mistakes are in `problems`."""

    def origin(line: int) -> Origin:
        return Origin("file", file=path, line=line)

    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem("", f"the file is not UTF-8 text (byte {error.start})", "save it as UTF-8", ABSENT, path)
        return ConfigSource({}, {}, origin(1), [problem], unread=True)
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        fix = f"check the path, which is seen from {File.cwd()}"
        near = near_names(path)
        if lookup(parse_path(path)):
            fix = f"write {path}=VALUE to set this key"
        elif near and not path.startswith(("/", ".")):
            fix = f"did you mean {' or '.join(near)}? Otherwise {fix}"
        problem = Problem("", reason, fix, ABSENT, path)
        return ConfigSource({}, {}, origin(1), [problem], unread=True)
    value, places, problems = parse(text, origin)
    unread = value is None and bool(problems)
    value = {} if value is None else value
    if not isinstance(value, dict):
        rule, fix = "a configuration file is a mapping of sections", "write section: and its keys below it"
        problems.append(Problem("", rule, fix, ABSENT, f"{path}:1"))
        value, unread = {}, True
    return ConfigSource(value, places, origin(1), problems, unread, text.startswith(RESOLVED))


def read_override(argument: str) -> ConfigSource:
    """`training.steps=500` as a source."""
    origin = Origin("argument", text=argument)
    name, equals, text = argument.partition("=")
    path: Path = tuple(name.strip().split("."))
    if len(path) > DEEPEST:
        return ConfigSource({}, {}, origin, [Problem("", *TOO_DEEP, ABSENT, f"argument {argument[:60]}...")])
    if not equals or not all(path):
        rule, fix = f"{argument!r} is neither a YAML file nor key.path=value", "write key.path=value without spaces"
        return ConfigSource({}, {}, origin, [Problem("", rule, fix, ABSENT, "argument")])
    value, below, problems = parse(text, lambda line: origin)
    values: dict[str, Any] = {}
    put(values, path, value)
    places: dict[Path, Origin] = {path[:length]: origin for length in range(1, len(path) + 1)}
    places.update({(*path, *known): place for known, place in below.items()})
    problems = [
        Problem(dotted((*path, each.key) if each.key else path), each.rule, each.fix, each.value, each.where)
        for each in problems
    ]
    return ConfigSource(values, places, origin, problems)
