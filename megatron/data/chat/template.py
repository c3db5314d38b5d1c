"""Chat templates: where a tokenizer's is, what it renders, and which characters of that are the assistant's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.foreign_json import read_json

from ..errors import DataError
from ..hashing import content_hash
from .conversation import BadConversation
from .shipped import TEMPLATES

TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it needs besides messages.

    Attributes:
        name: where it is from, for the manifest.
        text: in Jinja.
        values: texts of the special tokens, and values that the user gives.
    """

    name: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def tagged(self) -> bool:
        """Whether it marks the assistant's part."""
        return TAGS.search(self.text) is not None

    @property
    def hash(self) -> str:
        """SHA-256 of the template and its values."""
        return content_hash(repr((self.text, sorted(self.values.items()))))

    def assistant_spans(self, messages: list[dict[str, Any]], tools: list | None = None) -> tuple[str, list[Span]]:
        """The rendered conversation, and the characters [start, end) of each turn of the assistant.

        A template without tags is rendered once more for each turn: up to it, and with it. Each of these must be the
        beginning of the whole. White space behind the end of a turn is not part of it.

        Raises:
            BadConversation: the template refuses the messages, or rewrites earlier turns.
        """
        text, spans = self._render(messages, tools)
        if self.tagged:
            return text, spans
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], tools, begin=True)
            done, _ = self._render(messages[: number + 1], tools)
            done = done.rstrip()
            if not (text.startswith(before) and text.startswith(done) and len(before) < len(done)):
                raise BadConversation(
                    f"the template writes message {number + 1} differently when others follow, so its part is not known"
                )
            spans.append((len(before), len(done)))
        return text, spans

    def _render(self, messages: list, tools: list | None, begin: bool = False) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        tagged = self.tagged and not begin
        more = {"return_assistant_tokens_mask": tagged, "add_generation_prompt": begin, "tools": tools, **self.values}
        clock = {"strftime_now": ""}  # hides their clock: a text cannot be called
        try:
            texts, spans = render_jinja_template([messages], chat_template=self.text, **clock, **more)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            if "'str' object is not callable" in str(error) and "strftime_now" in self.text:
                raise DataError(
                    "--template",
                    "it writes today's date, but tokens must not depend on the day",
                    "give the date, such as --value date_string='26 Jul 2024'",
                ) from error
            raise BadConversation(f"the template refuses it: {error}") from error
        return texts[0], [(start, end) for start, end in spans[0]] if tagged else []


def find_template(tokenizer: str, name: str | None, values: dict[str, Any]) -> ChatTemplate:
    """The template that was asked for.

    Args:
        tokenizer: a folder, or a file in one. Its tokenizer_config.json or chat_template.jinja is read.
        name: One of TEMPLATES, or a .jinja file, with None for the tokenizer's own.
        values: The user's values for the template.

    Raises:
        DataError: there is none.
    """
    path = Path(tokenizer)
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder / "tokenizer_config.json")
    special = {key: text for key in SPECIAL if (text := _text(settings.get(key))) is not None}
    known = {**special, **values}
    if name in TEMPLATES:
        return ChatTemplate(str(name), TEMPLATES[str(name)], known)
    if name is not None:
        return ChatTemplate(Path(name).name, _read(Path(name)), known)
    if (own := folder / "chat_template.jinja").is_file():
        return ChatTemplate(own.name, _read(own), known)
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if not isinstance(text, str):
        raise DataError(
            folder,
            "the tokenizer's folder must have a chat template, in chat_template.jinja or tokenizer_config.json",
            f"give --template FILE.jinja, or one of {', '.join(TEMPLATES)}",
        )
    return ChatTemplate("tokenizer", text, known)


def control_tokens(added: Iterable[str], template: ChatTemplate) -> list[str]:
    """The added tokens that the template or its values write. No message may contain them."""
    written = "\0".join([template.text, *(str(value) for value in template.values.values())])
    return [token for token in added if token.strip() and token in written]


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise DataError(path, f"it must be JSON ({error})", "fetch the tokenizer again") from error
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    """Of a special token, which is a text or an object with one."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(path, f"the template cannot be read ({error})", "give a .jinja file") from error
