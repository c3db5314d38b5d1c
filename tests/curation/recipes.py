"""Recipes and runs that the tests of curation share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import zstandard

from megatron.curation.recipe import Recipe, read_recipe
from megatron.curation.run import run


def written(folder: Path, source: str, texts: list[str] | dict[str, str], file: str = "a.jsonl") -> Path:
    """A folder with one file of JSON lines."""
    (folder / source).mkdir(parents=True, exist_ok=True)
    named = texts.items() if isinstance(texts, dict) else ((None, each) for each in texts)
    records = [{"text": text} | ({"name": name} if name else {}) for name, text in named]
    (folder / source / file).write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder / source


def recipe(folder: Path, stages: list[Any], sources: list[dict[str, Any]], **more: Any) -> Recipe:
    values = {"output": str(folder / "out"), "sources": sources, "stages": stages, **more}
    (folder / "recipe.yml").write_text(json.dumps(values))
    return read_recipe(folder / "recipe.yml")


def curate(folder: Path, stages: list[Any], sources: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The report of a whole run into folder/out."""
    return run(recipe(folder, stages, sources, **more), quiet=True)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of all files of a folder, in the order of the files."""
    content = b"".join(
        zstandard.ZstdDecompressor().stream_reader(each.read_bytes()).read() for each in sorted(path.rglob("*.zst"))
    )
    return [json.loads(line) for line in content.decode().splitlines()]


def kept(folder: Path) -> list[str]:
    return [each["id"] for each in lines(folder / "documents")]


def tree(folder: Path) -> dict[str, str]:
    """A hash of each file, but for the logs of datatrove."""
    files = (
        each for each in sorted(folder.rglob("*")) if each.is_file() and "logs" not in each.relative_to(folder).parts
    )
    return {str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
