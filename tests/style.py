"""How the project's English measures up to docs/style.md: house words, long sentences, semicolons, per area.

python -m tests.style                 the table
python -m tests.style AREA ...        each find of these areas, with its place
python -m tests.style --tighten       lower the budget (tests/style.json) to the present counts. It never rises
python -m tests.style --folder DIR    the table for another project's README, docs and Python files

Areas: one per page of documentation. For Python: docstrings, comments and messages, once each for the package, bench,
tools, examples and tests. Messages are all other strings of three or more words, such as help and error texts.
Comments of YAML files are one area.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths import ROOT

BUDGET = ROOT / "tests" / "style.json"
LONGEST = 30  # words in a sentence
SHORTEST = 4  # words. A shorter one is a label, a name or a number, and would flatter the percentiles
COUNTS = ("words", "long", "semicolons")

# A pattern, and the terms of the field to use in its place.
HOUSE_WORDS = {
    r"tell|tells|told|telling": "report, log, print, notify",
    r"beside": "next to, in addition to, with, and",
    r"(?:leave|leaves|left|leaving) (?:\w+ ){0,2}out": "skip, exclude, omit, mask",
    r"(?:go|goes|going|gone|went) on": "continue, resume",
    r"nobody": "no rank, no process, no user",
    r"alone": "only, before its word",
    r"(?:so|as) many": "the number itself: n, the same number of",
    r"of (?:which|whom)": "a second sentence that names the thing",
    r"those (?:that|which|of|who)": "the thing's name",
    r"anew": "again",
    r"(?:look|looks|looked|looking) (?:at|into|for|whether)": "inspect, check, examine, search",
    r"(?:hear|hears|heard)": "receive, detect",
    r"heed|heeds|heeded": "read, use, respect",
    r"mend|mends|mended": "fix",
}
PATTERNS = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): term for word, term in HOUSE_WORDS.items()}
BEGINS_WITH_WHAT = re.compile(r"^What\b[^?]*$")

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`+[^`]*`+")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
COLUMNS = re.compile(r"(?<=\S) {2,}(?=\S)")  # between the cells of a table without lines
SENTENCE = re.compile(  # before a capital, a number, code, or an entry "name: ..." of a list
    r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`]|\w+(?:, \w+)*: )"
)
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*#+\s|^\s*>")
YAML_COMMENT = re.compile(r"(?:^|\s)#\s*(.*)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|Fig|Eq|no)\.")


@dataclass
class Area:
    """Sentences of one area, and their faults as (place, fault, sentence)."""

    lengths: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    finds: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, place: str, sentence: str) -> None:
        words = sum(any(letter.isalnum() for letter in word) for word in sentence.split())
        if words < SHORTEST:
            return
        self.lengths.append(words)
        for pattern, term in PATTERNS.items():
            for match in pattern.finditer(sentence):
                self._found("words", place, f"{match[0]!r} -> {term}", sentence)
        if BEGINS_WITH_WHAT.match(sentence):
            self._found("words", place, "'What ...' -> a noun or a verb", sentence)
        if words > LONGEST:
            self._found("long", place, f"{words} words", sentence)
        if ";" in sentence:
            self._found("semicolons", place, "semicolon", sentence)

    def _found(self, kind: str, place: str, fault: str, sentence: str) -> None:
        self.counts[kind] += 1
        self.finds.append((place, fault, sentence))

    def percentile(self, share: float) -> int:
        """Words of the sentence below which that share of all lies."""
        return sorted(self.lengths)[min(int(share * len(self.lengths)), len(self.lengths) - 1)] if self.lengths else 0


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown or reStructuredText: no code blocks. A cell of a table or an item stands by itself."""
    text = FENCE.sub("\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    text = LINK.sub(r"\1", FORMULA.sub("X", CODE.sub("X", text)))
    for block in _blocks(text):
        for sentence in SENTENCE.split(ABBREVIATION.sub(r"\1", " ".join(block.split()))):
            yield sentence.strip()


def _blocks(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            yield " ".join(lines)
            lines = []
            yield from line.strip().strip("|").split("|")
        elif COLUMNS.search(line):
            yield " ".join(lines)
            lines = []
            yield from COLUMNS.split(line)
        elif not line.strip() or ITEM.match(line):
            yield " ".join(lines)
            lines = [ITEM.sub("", line)]
        else:
            lines.append(line)
    yield " ".join(lines)


def markdown(area: Area, path: Path) -> None:
    """Add the sentences of a page."""
    for sentence in sentences(path.read_text(encoding="utf-8")):
        area.add(path.name, sentence)


def python(areas: dict[str, Area], name: str, path: Path) -> None:
    """Add a file's docstrings, comments and other strings to the three areas of that name."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {}
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None:
            docstrings[id(node.body[0].value)] = text  # type: ignore[attr-defined]
            for sentence in sentences(text):
                areas[f"{name} docstrings"].add(f"{path}:{node.body[0].lineno}", sentence)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        text = _string(node) if id(node) not in inner or isinstance(node, ast.JoinedStr) else None
        if text is not None and id(node) not in docstrings and len(text.split()) > 2:
            for sentence in sentences(text):
                areas[f"{name} messages"].add(f"{path}:{node.lineno}", sentence)  # type: ignore[attr-defined]
    for line, comment in _comments(source):
        for sentence in sentences(comment):
            areas[f"{name} comments"].add(f"{path}:{line}", sentence)


def _string(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with their first line. Comments on successive lines of their own are one."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#:! ")
            if block and token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
                block.append(text)
            else:
                if block:
                    yield begin, " ".join(block)
                block, begin = [text], token.start[0]
            last = token.start[0]
    if block:
        yield begin, " ".join(block)


def yaml(area: Area, path: Path) -> None:
    """Add the comments of a YAML file. Comments on successive lines of their own are one."""
    block: list[str] = []
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        own, comment = line.lstrip().startswith("#"), YAML_COMMENT.search(line)
        if block and not own:
            for sentence in sentences(" ".join(block)):
                area.add(f"{path}:{number - len(block)}", sentence)
            block = []
        if own:
            block.append(line.lstrip("# "))
        elif comment is not None:
            for sentence in sentences(comment[1]):
                area.add(f"{path}:{number}", sentence)


def pages() -> list[Path]:
    """The documentation, except the page of rules, which quotes the words that it replaces."""
    root = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    docs = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/configuration/*.md")])
    return [*root, *(page for page in docs if page.name != "style.md")]


def measure() -> dict[str, Area]:
    """Every area of this project."""
    areas: dict[str, Area] = defaultdict(Area)
    for page in pages():
        name = str(page.relative_to(ROOT))
        markdown(areas["docs/configuration.md" if name.startswith("docs/configuration/") else name], page)
    for name in ("megatron", "bench", "tools", "examples", "tests"):
        for path in sorted((ROOT / name).rglob("*.py")):
            python(areas, name, path)
    for name in ("configs", "examples", "layouts", "megatron", "tests"):
        for path in sorted((ROOT / name).rglob("*.yml")):
            yaml(areas["YAML comments"], path)
    del areas["tests messages"]  # inputs and expected texts
    return dict(areas)


def measure_folder(folder: Path) -> dict[str, Area]:
    """README, docs and Python of any project, without its tests."""
    areas: dict[str, Area] = defaultdict(Area)
    for page in [*folder.glob("*.md"), *folder.glob("docs/**/*.md")]:
        markdown(areas["documentation"], page)
    for path in sorted(folder.rglob("*.py")):
        if not {"tests", "test", ".venv"} & set(path.relative_to(folder).parts):
            python(areas, "source", path)
    return dict(areas)


def table(areas: dict[str, Area]) -> str:
    """Lines of text: counts of each area and of all, and the percentiles of sentence length."""
    lines = [f"{'area':32} sentences  p50  p90  p99   long  semicolons       house words"]
    every = Area()
    for area in areas.values():
        every.lengths += area.lengths
        for kind, count in area.counts.items():
            every.counts[kind] += count
    for name, area in {**areas, "all": every}.items():
        spread = "".join(f"{area.percentile(share):5}" for share in (0.5, 0.9, 0.99))
        long, semicolons, words = (area.counts[kind] for kind in ("long", "semicolons", "words"))
        share = f"({semicolons / max(len(area.lengths), 1):.1%})"
        lines.append(f"{name:32} {len(area.lengths):9}{spread}  {long:5}  {semicolons:5} {share:>8}  {words:13}")
    return "\n".join(lines)


def budget() -> dict[str, dict[str, int]]:
    """The counts that each area may have. An area that is not listed may have none."""
    return json.loads(BUDGET.read_text(encoding="utf-8"))


def tighten(areas: dict[str, Area]) -> None:
    """Lower the budget to what was measured."""
    old = budget()
    new = {}
    for name, area in areas.items():
        allowed = {kind: min(area.counts[kind], old.get(name, {}).get(kind, 0)) for kind in COUNTS}
        new[name] = {kind: count for kind, count in allowed.items() if count}
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(new[name])}" for name in sorted(new) if new[name])
    BUDGET.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA")
    parser.add_argument("--tighten", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    areas = measure_folder(options.folder) if options.folder else measure()
    for name in options.areas:
        for find in areas[name].finds:
            print(*find, sep=": ")
    if options.tighten:
        tighten(areas)
    if not options.areas:
        print(table(areas))
    return 0


if __name__ == "__main__":
    sys.exit(main())
