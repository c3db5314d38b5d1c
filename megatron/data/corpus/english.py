"""English about Python that is on every machine: the language reference, and descriptions of installed packages."""

from __future__ import annotations

import email
import hashlib
from collections.abc import Iterator
from importlib import metadata

ABOUT = "the language reference, and the descriptions of the installed packages (no network)"
_SHORTEST = 200  # characters of a text that is worth a document


def english_texts() -> Iterator[dict]:
    """The topics of the language reference, then each package's description, by name; no text twice."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name, text in [*((f"topic {name}", topics[name]) for name in sorted(topics)), *_descriptions()]:
        text = text.strip()
        if len(text) >= _SHORTEST and text not in seen:
            seen.add(text)
            yield {"text": text + "\n", "name": name}


def english_source() -> str:
    """What the texts are made from: Python, and the installed packages with their versions."""
    import platform

    listed = ",".join(f"{name}={each.version}" for name, each in _installed())
    return f"Python {platform.python_version()}, packages {hashlib.sha256(listed.encode()).hexdigest()[:16]}"


def _installed() -> list[tuple[str, metadata.Distribution]]:
    """Every package once (the first on the path counts, as in an import), by name."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        found.setdefault(each.name.lower(), each)
    return sorted(found.items())


def _descriptions() -> Iterator[tuple[str, str]]:
    for name, each in _installed():
        message = email.message_from_string(each.read_text("METADATA") or "")
        description = message.get_payload() or message.get("Description", "")  # below the headers, or one of them
        yield name, str(description)
