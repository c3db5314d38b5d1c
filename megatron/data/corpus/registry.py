"""Well-known corpora by name: location, key of the text, and content."""

from __future__ import annotations

import contextlib
import email
import hashlib
import io
import itertools
import json
import sysconfig
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.file_access import read_json, replace_file, replacing
from ..errors import DataError

if TYPE_CHECKING:
    import ast


ABOUT = "the language reference, and the descriptions of the installed packages (no network)"
_SHORTEST = 200  # characters of a document


def english_texts() -> Iterator[dict]:
    """The topics of the language reference, then each package's description, by name, without repetitions."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name, text in [*((f"topic {name}", topics[name]) for name in sorted(topics)), *_descriptions()]:
        text = text.strip()
        if len(text) >= _SHORTEST and text not in seen:
            seen.add(text)
            yield {"text": text + "\n", "name": name}


def english_source() -> str:
    """Versions of Python and of the installed packages, which the texts come from."""
    import platform

    listed = ",".join(f"{name}={each.version}" for name, each in _installed())
    return f"Python {platform.python_version()}, packages {hashlib.sha256(listed.encode()).hexdigest()[:16]}"


def _installed() -> list[tuple[str, metadata.Distribution]]:
    """Every package once (the first on the path, as in an import), by name."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        found.setdefault(each.name.lower(), each)
    return sorted(found.items())


def _descriptions() -> Iterator[tuple[str, str]]:
    for name, each in _installed():
        message = email.message_from_string(each.read_text("METADATA") or "")
        description = message.get_payload() or message.get("Description", "")  # below the headers, or one of them
        yield name, str(description)


@dataclass(frozen=True)
class HubCorpus:
    """The training split of a data set that `datasets` loads. `key` is the column of the text."""

    name: str
    about: str
    config: str | None = None
    key: str = "text"


@dataclass(frozen=True)
class Archive:
    """A file on the web."""

    url: str  # address
    member: str  # the file in the zip archive
    cuts: tuple[tuple[str, int], ...]  # names and ends, in bytes, of its customary parts
    about: str
    sha1: str | None = None  # of the content, as published


HUB = {
    "pile": HubCorpus("monology/pile-uncopyrighted", "The Pile without its copyrighted parts"),
    "pile-deduplicated": HubCorpus("EleutherAI/the_pile_deduplicated", "The Pile after near-deduplication"),
    "slimpajama": HubCorpus("cerebras/SlimPajama-627B", "RedPajama, cleaned and deduplicated, 627 B tokens"),
    "fineweb": HubCorpus(
        "HuggingFaceFW/fineweb", "Common Crawl, filtered: a sample of 10 B tokens", config="sample-10BT"
    ),
    "fineweb-edu": HubCorpus(
        "HuggingFaceFW/fineweb-edu", "educational part of FineWeb: a sample of 10 B tokens", config="sample-10BT"
    ),
    "dclm": HubCorpus("mlfoundations/dclm-baseline-1.0", "DCLM baseline"),
    "c4": HubCorpus("allenai/c4", "Colossal Clean Crawled Corpus, English", config="en"),
    "openwebtext": HubCorpus("Skylion007/openwebtext", "an open copy of WebText"),
    "wikipedia": HubCorpus("wikimedia/wikipedia", "English Wikipedia", config="20231101.en"),
    "wikitext": HubCorpus("Salesforce/wikitext", "WikiText-103", config="wikitext-103-raw-v1"),
    "tinystories": HubCorpus("roneneldan/TinyStories", "short stories in simple words"),
    "starcoder": HubCorpus("bigcode/starcoderdata", "source code in 80 languages", key="content"),
    "open-web-math": HubCorpus("open-web-math/open-web-math", "mathematics from the web"),
}
ARCHIVES = {
    "enwik8": Archive(
        "http://mattmahoney.net/dc/enwik8.zip",
        "enwik8",
        (("train", 90_000_000), ("validation", 95_000_000), ("test", 100_000_000)),
        "the first 10^8 bytes of Wikipedia, cut 90/5/5",
        "57b8363b814821dc9d47aa4d41f58733519076b2",
    )
}
STDLIB_ABOUT = "the Python standard library's own sources and documentation texts (no network)"


def corpora() -> dict[str, str]:
    """Names of all corpora, with a line about each."""
    local = {"stdlib": STDLIB_ABOUT, "english": ABOUT}
    archives = {name: each.about for name, each in ARCHIVES.items()}
    return {**local, **archives, **{name: each.about for name, each in HUB.items()}}


def prepare(name: str, folder: Path, validation: float = 0.02, limit: int | None = None) -> dict:
    """Write a corpus as `<name>_<part>.jsonl` files. Finished files are kept.

    Args:
        validation: share of documents for validation, if the corpus has no customary cut.
        limit: largest number of documents.

    Returns:
        `files`, by part, with `path`, `documents`, `bytes` and `sha256`.
    """
    if name not in corpora():
        raise DataError(name, "this corpus is not known", f"one of {', '.join(corpora())}, or tokenize.py --dataset")
    record = folder / f"{name}.json"
    state = {"name": name, "validation": validation, "limit": limit, "source": _source(name)}
    if record.is_file():
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # not ours: refused below
            known = read_json(record)
            if known["state"] == state and all(_intact(part) for part in known["files"].values()):
                return {"files": known["files"], "kept": True}
    _refuse_foreign(record, [folder / f"{name}_{part}.jsonl" for part in _parts(name)])
    folder.mkdir(parents=True, exist_ok=True)
    if name in ARCHIVES:
        files = _from_archive(name, ARCHIVES[name], folder)
    else:
        local = {"stdlib": stdlib_texts, "english": english_texts}
        texts = local[name]() if name in local else _hub_texts(HUB[name])
        files = _cut(name, texts, folder, validation, limit)
    replace_file(record, json.dumps({"state": state, "files": files}, indent=1))
    return {"files": files, "kept": False}


def _source(name: str) -> str:
    if name == "stdlib":
        import platform

        return f"Python {platform.python_version()}"
    if name == "english":
        return english_source()
    return ARCHIVES[name].url if name in ARCHIVES else HUB[name].name


def _parts(name: str) -> list[str]:
    return [part for part, _ in ARCHIVES[name].cuts] if name in ARCHIVES else ["train", "validation"]


def _refuse_foreign(record: Path, paths: list[Path]) -> None:
    """Refuse to replace files that are not in the record of an earlier call."""
    known = set()
    if record.is_file():
        try:
            known = {Path(part["path"]).resolve() for part in read_json(record)["files"].values()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(record, "it is not a record of this program", "give another --output") from error
    for path in paths:
        if path.exists() and path.resolve() not in known:
            raise DataError(
                path, "it exists, and this program did not write it", "move it away, or give another --output"
            )


def _intact(part: dict) -> bool:
    path = Path(part["path"])
    return path.is_file() and path.stat().st_size == part["bytes"]


class _Lines:
    """A file of JSON lines that stands at its path when `stack` closes without an error."""

    def __init__(self, path: Path, stack: contextlib.ExitStack):
        self.path, self.file = path, stack.enter_context(replacing(path))
        self.digest, self.documents, self.bytes = hashlib.sha256(), 0, 0

    def add(self, record: dict) -> None:
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self.file.write(line)
        self.digest.update(line)
        self.documents, self.bytes = self.documents + 1, self.bytes + len(line)

    def facts(self) -> dict:
        counts = {"documents": self.documents, "bytes": self.bytes}
        return {"path": str(self.path), **counts, "sha256": self.digest.hexdigest()}


def _cut(name: str, records: Iterator[dict], folder: Path, validation: float, limit: int | None) -> dict:
    """Split records into training and validation by a hash of the text, or of the `group` of records that stay
    together."""
    with contextlib.ExitStack() as stack:
        parts = {part: _Lines(folder / f"{name}_{part}.jsonl", stack) for part in ("train", "validation")}
        for record in itertools.islice(records, limit):
            key = record.pop("group", record["text"]).encode("utf-8", "replace")
            draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64
            parts["validation" if draw < validation else "train"].add(record)
        if validation > 0:
            for part, lines in parts.items():
                if lines.documents == 0:  # no token file can be made of it
                    rule = f"none of its {sum(each.documents for each in parts.values())} documents belongs to {part}"
                    raise DataError(name, rule, "give another share to --validation (0 for none), or a higher --limit")
    return {part: lines.facts() for part, lines in parts.items()}


def stdlib_texts() -> Iterator[dict]:
    """Each module of the standard library as source text, and each longer documentation text, by path.

    Tests, and modules that build or remove programs, are skipped. A documentation text is part of its module's source,
    so all texts of a file are one `group` of a cut."""
    import ast
    import inspect

    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip"}
    skipped |= {"pydoc_data", "turtledemo"}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if skipped.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue  # sample files of other encodings and versions
        if text.strip():
            yield {"text": text, "name": name, "group": name}
        for node in _documented(tree):
            documentation = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(documentation) >= 200 and documentation not in seen:
                seen.add(documentation)
                yield {"text": documentation + "\n", "name": f"{name}:{getattr(node, 'name', 'module')}", "group": name}


def _documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, and the classes and functions in it that are not inside of functions or branches."""
    import ast

    waiting: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [
                x for x in reversed(node.body) if isinstance(x, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            ]


def _hub_texts(corpus: HubCorpus) -> Iterator[dict]:
    import datasets

    try:
        rows = datasets.load_dataset(corpus.name, corpus.config, split="train", streaming=True)
        for row in rows:
            yield {"text": row[corpus.key]}
    except (OSError, ValueError, ConnectionError) as error:
        raise DataError(
            corpus.name, f"datasets cannot load it ({error})", "check the network, and whether it asks for a login"
        ) from error


def _from_archive(name: str, archive: Archive, folder: Path) -> dict:
    try:
        with urllib.request.urlopen(archive.url, timeout=60) as answer:
            packed = answer.read()
    except OSError as error:
        raise DataError(archive.url, f"it cannot be fetched ({error})", "check the network") from error
    with zipfile.ZipFile(io.BytesIO(packed)) as opened:
        content = opened.read(archive.member)
    if archive.sha1 and hashlib.sha1(content).hexdigest() != archive.sha1:
        raise DataError(archive.url, "its content is not what it should be (SHA-1 differs)", "fetch it again")
    files, begin = {}, 0
    for part, end in archive.cuts:
        while end < len(content) and content[end] & 0xC0 == 0x80:  # not inside of a character
            end += 1
        with contextlib.ExitStack() as stack:
            lines = _Lines(folder / f"{name}_{part}.jsonl", stack)
            lines.add({"text": content[begin:end].decode("utf-8")})
        files[part], begin = lines.facts(), end
    return files
