"""Conversations and chat templates: find, render, locate the characters of the assistant, encode to ids and labels."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.file_access import parse_json, read_json
from megatron.config.sections.data import TokenizerSection

from ..corpus.inputs import InputChunk
from ..errors import DataError
from ..hashing import content_hash
from ..sample import IGNORED
from ..tokenizer import HuggingFaceTokenizer, build_tokenizer, token_text

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names: `{"from": "human", "value": "..."}`.
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Templates for tokenizers without one. `{% generation %}` marks the assistant's text and the token after it.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Needs no token but the one that ends a text, which ends the assistant's turns.
PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ':' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
Span = tuple[int, int]


class BadConversation(ValueError):
    """Why a record is no conversation that can be trained on."""


def conversation_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a record, each with `role`, `content` and what else it has.

    Args:
        value: of the record's key: a list of `{"role", "content"}`, or ShareGPT's list of `{"from", "value"}`.

    Raises:
        BadConversation: it is something else, has an unknown role, or no assistant answers in it.
    """
    if not isinstance(value, list) or not value:
        raise BadConversation("a conversation must be a list of messages")
    found = [_message(number, each) for number, each in enumerate(value, 1)]
    if not any(each["role"] == "assistant" for each in found):
        raise BadConversation("no message is the assistant's")
    return found


def _message(number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadConversation(f"message {number} must be an object with role and content")
    message = {key: part for key, part in value.items() if part is not None}  # tables fill absent keys with null
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {**message, "role": SHAREGPT.get(role, role) if isinstance(role, str) else role}
        message["content"] = message.pop("value", None)
    if (role := message.get("role")) not in ROLES:
        raise BadConversation(f"message {number} has the role {role!r}, which must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        message["content"] = content = ""
    if not isinstance(content, str):
        raise BadConversation(f"message {number} must have a text as content")
    return message


@dataclass(frozen=True)
class ChatTemplate:
    """A template with its values."""

    name: str  # its origin, for the manifest
    text: str  # in Jinja
    values: dict[str, Any] = field(default_factory=dict)  # texts of the special tokens, and the user's values

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

    def prompt(self, messages: Any) -> str:
        """The text of messages up to the beginning of the assistant's next turn.

        Raises:
            BadConversation: they are no messages, or the template refuses them.
        """
        if not isinstance(messages, list) or not messages:
            raise BadConversation("a conversation must be a list of messages")
        return self._render([_message(number, each) for number, each in enumerate(messages, 1)], None, begin=True)[0]

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
                rule = "it writes today's date, but tokens must not depend on the day"
                fix = "give the date, such as --value date_string='26 Jul 2024'"
                raise DataError("--template", rule, fix) from error
            raise BadConversation(f"the template refuses it: {error}") from error
        return texts[0], [(start, end) for start, end in spans[0]] if tagged else []


def find_template(tokenizer: str, name: str | None, values: dict[str, Any]) -> ChatTemplate:
    """The requested template.

    Args:
        tokenizer: a folder, or a file in one. Its tokenizer_config.json or chat_template.jinja is read.
        name: One of TEMPLATES, or a .jinja file. None: the tokenizer's own.
        values: The user's values for the template.

    Raises:
        DataError: there is none.
    """
    path = Path(tokenizer)
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder / "tokenizer_config.json")
    special = {key: text for key in SPECIAL if (text := token_text(settings.get(key))) is not None}
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
        rule = "the tokenizer's folder must have a chat template, in chat_template.jinja or tokenizer_config.json"
        raise DataError(folder, rule, f"give --template FILE.jinja, or one of {', '.join(TEMPLATES)}")
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(path, f"the template cannot be read ({error})", "give a .jinja file") from error


LARGEST_REWARD = 1e30
TRAIN = ("assistant", "last", "all")


@dataclass(frozen=True)
class ChatTreatment:
    """How conversations are treated."""

    key: str = "messages"  # Key or column of the messages.
    # Which tokens are labels. It is one of TRAIN: the assistant's turns, the last one, or all tokens.
    train: str = "assistant"
    append_eod: bool = True  # Add an end-of-document token, which is no label
    longest: int | None = None  # Omit conversations of more tokens
    reward: str | None = None  # Key of a number, or of true or false, that rates the conversation


@dataclass
class EncodedChats:
    """The conversations of a chunk."""

    # tokens, labels: of all conversations back to back. A label is its token or IGNORED.
    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # tokens of each
    rewards: list[float] = field(default_factory=list)  # of each, if they are read
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line, reason) of records that are no conversation
    long: int = 0  # conversations that were omitted for their length


class ChatEncoder:
    """The encoder of a process: chunks of conversations to ids and labels."""

    def __init__(self, section: TokenizerSection, template: ChatTemplate, treatment: ChatTreatment):
        tokenizer = build_tokenizer(section)
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise DataError("--tokenizer", "conversations need a tokenizer.json", "give one, or a folder with one")
        self.tokenizer, self.template, self.treatment = tokenizer, template, treatment
        added = [each.content for each in tokenizer.backend.get_added_tokens_decoder().values()]
        self.control = control_tokens(added, template)
        bos = template.values.get("bos_token")
        self.bos = tokenizer.backend.token_to_id(bos) if isinstance(bos, str) else None

    def __call__(self, chunk: InputChunk) -> EncodedChats:
        done = EncodedChats()
        for line, record in _records(chunk):
            try:
                ids, labels = self.encode(*self._parts(record, chunk.kind))
                rewards = [] if self.treatment.reward is None else [_reward(record, self.treatment.reward)]
            except BadConversation as error:
                done.bad.append((line, str(error)))
                continue
            if self.treatment.longest is not None and len(ids) > self.treatment.longest:
                done.long += 1
                continue
            done.tokens += ids
            done.labels += labels
            done.sizes.append(len(ids))
            done.rewards += rewards
        return done

    def _parts(self, record: Any, kind: str) -> tuple[list[dict[str, Any]], list | None]:
        """Messages and tools. A line has both, a column of a table has messages only."""
        if isinstance(record, BadConversation):
            raise record
        if kind != "lines":
            return conversation_of(record), None
        if not isinstance(record, dict) or self.treatment.key not in record:
            raise BadConversation(f"it must be a JSON object with the key {self.treatment.key!r}")
        tools = record.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
            raise BadConversation("tools must be a list of objects")
        return conversation_of(record[self.treatment.key]), tools

    def encode(self, messages: list[dict[str, Any]], tools: list | None = None) -> tuple[list[int], list[int]]:
        """Ids of a conversation and its labels.

        Raises:
            BadConversation: it has no label, a message with a token of the template, a second beginning of a text, or
                a token across the border of a turn.
        """
        for number, message in enumerate(messages, 1):
            if found := next((token for token in self.control if token in message["content"]), None):
                raise BadConversation(f"message {number} has {found!r}, which the template writes between messages")
        text, spans = self.template.assistant_spans(messages, tools)
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        ids = list(encoding.ids)
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:
            raise BadConversation("it begins with two tokens that begin a text")
        trained = self._trained(text, encoding.offsets, spans)
        labels = [token if chosen else IGNORED for token, chosen in zip(ids, trained)]
        if all(label == IGNORED for label in labels[1:]):  # the first token is predicted by nothing
            raise BadConversation("no token of it would be trained on")
        eod = self.tokenizer.eod_id
        if self.treatment.append_eod and eod is not None and ids[-1] != eod:
            ids.append(eod)
            labels.append(IGNORED)
        return ids, labels

    def _trained(self, text: str, offsets: list[Span], spans: list[Span]) -> list[bool]:
        """Which tokens are labels. A token that begins in the white space before a turn is the turn's first one."""
        if self.treatment.train == "all":
            return [True] * len(offsets)
        chosen = spans[-1:] if self.treatment.train == "last" else spans
        found = []
        for start, end in offsets:
            span = next(((first, last) for first, last in chosen if start < last and end > first), None)
            if span and (text[start : span[0]].strip() or text[span[1] : end].strip()):
                raise BadConversation(f"the token {text[start:end]!r} is partly the assistant's")
            found.append(span is not None)
        return found


def _reward(record: Any, key: str) -> float:
    """The number of a record. True is 1 and false is -1."""
    found = record.get(key) if isinstance(record, dict) else None
    if isinstance(found, bool):
        return 1.0 if found else -1.0
    if not isinstance(found, (int, float)) or not abs(found) < LARGEST_REWARD:
        raise BadConversation(f"it must have a finite number, true or false under the key {key!r}, in JSON lines")
    return float(found)


def _records(chunk: InputChunk) -> list[tuple[int, Any]]:
    """(line, record) of a chunk. A line that is no JSON is a `BadConversation`."""
    if isinstance(chunk.content, list):
        return list(enumerate(chunk.content, chunk.line))
    found: list[tuple[int, Any]] = []
    for number, line in enumerate(chunk.content.splitlines(), chunk.line):
        if line.strip():
            try:
                found.append((number, parse_json(line)))
            except (ValueError, RecursionError) as error:
                found.append((number, BadConversation(f"it is no JSON ({error})")))
    return found


def arrays(result: EncodedChats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, labels and sizes."""
    return np.array(result.tokens, np.int64), np.array(result.labels, np.int64), np.array(result.sizes, np.int64)
