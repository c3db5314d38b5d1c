"""The texts of an evaluation set, out of a file."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.foreign_json import parse_json
from megatron.data.errors import DataError

FORMS = (("text",), ("context", "continuation"))  # fields that are taken if none are named
BLANK = re.compile(r"\n[ \t]*\n")


def read_examples(path: str | Path, fields: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Names and texts: the objects of a file of JSON lines (`.jsonl`), or the paragraphs of a text (any other ending).

    Args:
        fields: of an object, whose texts are joined by spaces; by default `text`, or `context` and `continuation`.

    Raises:
        DataError: the file cannot be read, or a line is not such an object.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"it must be a readable file in UTF-8: {error}", "give another one") from error
    if Path(path).suffix != ".jsonl":
        parts = [part.strip() for part in BLANK.split(content)]
        return [(str(number), part) for number, part in enumerate((part for part in parts if part), 1)]
    lines = enumerate(content.split("\n"), 1)
    return [(str(number), _text(line, f"{path}:{number}", fields)) for number, line in lines if line.strip()]


def _text(line: str, where: str, fields: tuple[str, ...]) -> str:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise DataError(where, f"it must be a JSON object: {error}", "mend the line") from error
    forms = (fields,) if fields else FORMS
    form = next((form for form in forms if isinstance(value, dict) and all(name in value for name in form)), None)
    if form is None:
        wanted = " or ".join(" and ".join(map(repr, form)) for form in forms)
        has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(where, f"it must have {wanted}, and has {has}", "name the fields: --fields question,answer")
    if not all(isinstance(value[name], str) for name in form):
        raise DataError(where, f"{' and '.join(form)} must be text", "name other fields: --fields question,answer")
    return " ".join(value[name] for name in form)
