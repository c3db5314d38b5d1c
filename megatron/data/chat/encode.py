"""Conversations to ids and labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.config.file_access import parse_json

from ..corpus.inputs import InputChunk
from ..errors import DataError
from ..sample import IGNORED
from ..tokenizer import HuggingFaceTokenizer, build_tokenizer
from .template import BadConversation, ChatTemplate, Span, control_tokens, conversation_of

if TYPE_CHECKING:
    from megatron.config.sections.data import TokenizerSection

LARGEST_REWARD = 1e30
TRAIN = ("assistant", "last", "all")


@dataclass(frozen=True)
class ChatTreatment:
    """How conversations are treated.

    Attributes:
        key: Key or column of the messages.
        train: Which tokens are labels. It is one of TRAIN: the assistant's turns, the last one, or all tokens.
        append_eod: Add an end-of-document token, which is no label.
        longest: Omit conversations of more tokens.
        reward: Key of a number, or of true or false, that rates the conversation.
    """

    key: str = "messages"
    train: str = "assistant"
    append_eod: bool = True
    longest: int | None = None
    reward: str | None = None


@dataclass
class EncodedChats:
    """The conversations of a chunk.

    Attributes:
        tokens, labels: of all conversations back to back. A label is its token or IGNORED.
        sizes: tokens of each.
        rewards: of each, if they are read.
        bad: (line, reason) of records that are no conversation.
        long: conversations that were omitted for their length.
    """

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    long: int = 0


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
