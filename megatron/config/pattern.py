"""The layer pattern: `model.layers` as a list of blocks.

    stack  := item+
    item   := (block | '(' stack ')') ['x' count] | 'recurrent' '(' stack ')'
    block  := term ['/' term]              mixer/ffn, or a bare mixer, or a bare ffn
    term   := one ('&' one)* ('+' one)*    mixers that read the same and are summed, and kinds that are added
    one    := kind ['@' variant]

`(attention/mlp) x12`, `(mamba moe) x18`, `(mamba2 x5 mamba2+shared_attention) x6`, `(attention&mamba2/mlp) x36`. White
space separates blocks. One group of a stack may be `recurrent(...)`: its blocks are repeated with the same weights, as
often as `model.recurrence` says."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn, Protocol

from .kind import kinds_of

MAX_BLOCKS = 100_000
MAX_OPEN = 32  # parentheses inside each other
RECURRENT = "recurrent"  # the word before the group that is repeated


class HasRole(Protocol):
    """The role of a kind in the pattern: "mixer" (before the slash), "ffn" (after it), "side" (after '+')."""

    @property
    def role(self) -> str: ...


@dataclass(frozen=True)
class Kind:
    """A named kind with its variant.

    Attributes:
        side: the kinds whose output is added to what a mixer reads (`mamba2+shared_attention`).
        others: the mixers that read the same input as this one. All outputs are summed (`attention&mamba2`).
    """

    name: str
    variant: str | None = None
    side: "tuple[Kind, ...]" = ()
    others: "tuple[Kind, ...]" = ()

    def __str__(self) -> str:
        own = f"{self.name}@{self.variant}" if self.variant else self.name
        return "+".join(("&".join((own, *map(str, self.others))), *map(str, self.side)))


@dataclass(frozen=True)
class BlockPattern:
    """One layer of the stack: a mixer, a feed-forward, or both."""

    mixer: Kind | None = None
    ffn: Kind | None = None
    recurrent: bool = False  # it is in the core, whose blocks are repeated

    @property
    def mixers(self) -> tuple[Kind, ...]:
        """Its mixers: none, one, or several whose outputs are summed."""
        return (self.mixer, *self.mixer.others) if self.mixer else ()

    @property
    def layers(self) -> tuple[Kind, ...]:
        """Its mixers, then its feed-forward."""
        return (*self.mixers, self.ffn) if self.ffn else self.mixers

    @property
    def side(self) -> tuple[Kind, ...]:
        """The kinds that are added to its mixers."""
        return self.mixer.side if self.mixer else ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All its kinds in order."""
        return (*self.mixers, *self.side, self.ffn) if self.ffn else (*self.mixers, *self.side)

    def __str__(self) -> str:
        own = "/".join(str(kind) for kind in (self.mixer, self.ffn) if kind)
        return f"{RECURRENT}({own})" if self.recurrent else own


class PatternError(ValueError):
    """A pattern that cannot be read.

    Attributes:
        column: where, counted from 1.
        rule: what is wrong.
        fix: the advice.
    """

    def __init__(self, text: str, position: int, rule: str, fix: str):
        self.column, self.rule, self.fix = position + 1, rule, fix
        line = re.sub(r"\s", " ", text)
        super().__init__(f"column {self.column}: {rule}\n    {line}\n    {' ' * position}^\n{fix}")


@dataclass(frozen=True)
class _Token:
    kind: str  # "name", "count", "end", or the character itself
    text: str
    position: int


_TOKEN = re.compile(r"(?P<space>\s+)|(?P<count>x\s*\d+(?![\w]))|(?P<name>[A-Za-z_]\w*)|(?P<mark>[()/@+&])")


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise PatternError(
                text,
                position,
                f"{text[position]!r} is no part of a layer pattern",
                "use kinds, '/', '@variant', '&', '+', parentheses and 'x N', as in '(attention/mlp) x12'",
            )
        if match.lastgroup != "space":
            kind = match.group() if match.lastgroup in (None, "mark") else match.lastgroup
            tokens.append(_Token(kind or "", match.group(), position))
        position = match.end()
    return [*tokens, _Token("end", "", len(text))]


class _Reader:
    """A recursive descent over the tokens, with one method per line of the grammar."""

    def __init__(self, text: str, kinds: Mapping[str, HasRole]):
        self.text, self.kinds = text, kinds
        self.tokens, self.at = _tokens(text), 0
        self.open = 0  # parentheses
        self.core: _Token | None = None  # where the recurrent group is

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, kind: str) -> _Token | None:
        if self.token.kind != kind:
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def fail(self, token: _Token, rule: str, fix: str) -> NoReturn:
        raise PatternError(self.text, token.position, rule, fix)

    def stack(self, opened: _Token | None) -> list[BlockPattern]:
        blocks: list[BlockPattern] = []
        while self.token.kind in ("name", "("):
            item = self.item()
            if len(blocks) + len(item) > MAX_BLOCKS:
                self.fail(self.token, f"the pattern has more than {MAX_BLOCKS} blocks", "repeat fewer times")
            blocks += item
        if not blocks:
            self.fail(self.token, "a block is expected here", f"name a kind: {', '.join(sorted(self.kinds))}")
        if opened and not self.take(")"):
            self.fail(opened, "this parenthesis is never closed", "close it with ')'")
        return blocks

    def recurrent(self) -> list[BlockPattern]:
        """The core: at the outermost level, once, and without a count of its own."""
        word = self.take("name")
        assert word is not None
        if self.open:
            fix = f"put {RECURRENT}(...) next to other groups, not inside of one"
            self.fail(word, f"a {RECURRENT} group stands inside no other group", fix)
        if self.core is not None:
            fix = "make one group of what is repeated"
            self.fail(word, f"a pattern has one {RECURRENT} group", fix)
        self.core = word
        opened = self.take("(")
        self.open += 1
        blocks = [replace(block, recurrent=True) for block in self.stack(opened)]
        self.open -= 1
        if self.token.kind == "count":
            fix = "give model.recurrence.mean, and remove the number"
            self.fail(self.token, f"how often a {RECURRENT} group is repeated is drawn in each step", fix)
        return blocks

    def item(self) -> list[BlockPattern]:
        if self.token.text == RECURRENT and self.tokens[self.at + 1].kind == "(":
            return self.recurrent()
        opened = self.take("(")
        if opened:
            self.open += 1
            if self.open > MAX_OPEN:
                self.fail(opened, f"groups are nested at most {MAX_OPEN} deep", "remove parentheses")
        blocks = self.stack(opened) if opened else [self.block()]
        self.open -= bool(opened)
        repeat = self.take("count")
        if repeat is None:
            return blocks
        digits = repeat.text[1:].strip().lstrip("0")
        count = int(digits or 0) if len(digits) <= len(str(MAX_BLOCKS)) else MAX_BLOCKS + 1
        if count < 1:
            self.fail(repeat, "a group is repeated at least once", "write x1 or more, or remove the group")
        if count * len(blocks) > MAX_BLOCKS:
            self.fail(repeat, f"the pattern has more than {MAX_BLOCKS} blocks", "repeat fewer times")
        return blocks * count

    def block(self) -> BlockPattern:
        first_token = self.token
        first = self.term()
        if not self.take("/"):
            return BlockPattern(mixer=first) if self.role(first) == "mixer" else BlockPattern(ffn=first)
        if self.role(first) != "mixer":
            self.fail(
                first_token,
                f"{first.name} is a feed-forward and cannot stand before '/'",
                f"write mixer/ffn, or only {first}",
            )
        second_token = self.token
        second = self.term()
        if self.role(second) != "ffn":
            self.fail(
                second_token,
                f"{second.name} is a mixer and cannot stand after '/'",
                f"write '{first} {second}' for two blocks",
            )
        if self.token.kind == "/":
            self.fail(self.token, "a block is one mixer and one feed-forward", "put a space between blocks")
        return BlockPattern(mixer=first, ffn=second)

    def term(self) -> Kind:
        token = self.token
        kind = self.kind()
        if self.kinds[kind.name].role == "side":
            fix = f"add it to a mixer, as in mamba2+{kind.name}"
            self.fail(token, f"{kind.name} only stands after a '+'", fix)
        others: list[Kind] = []
        while self.take("&"):
            other_token = self.token
            other = self.kind()
            for each, place in ((kind, token), (other, other_token)):
                if self.role(each) != "mixer":
                    fix = "write 'attention&mamba2' for two mixers that read the same"
                    self.fail(place, f"{each.name} is no mixer and cannot stand next to '&'", fix)
            if other.name in (kind.name, *(each.name for each in others)):
                fix = "name each kind once, or write two blocks"
                self.fail(other_token, f"{other.name} stands in this block already", fix)
            others.append(other)
        side = []
        while self.take("+"):
            token = self.token
            if self.role(kind) != "mixer":
                self.fail(token, f"nothing is added to {kind.name}", "write '+' after a mixer")
            other = self.kind()
            if self.kinds[other.name].role != "side":
                fix = "put a space between blocks, or '/' before an ffn"
                self.fail(token, f"{other.name} cannot stand after a '+'", fix)
            if other in side:
                self.fail(token, f"{other} is added to {kind.name} already", "name it once")
            side.append(other)
        return Kind(kind.name, kind.variant, tuple(side), tuple(others))

    def kind(self) -> Kind:
        token = self.take("name")
        if token is None:
            self.fail(self.token, "a kind of layer is expected here", f"name one of: {', '.join(sorted(self.kinds))}")
        if token.text not in self.kinds:
            near = difflib.get_close_matches(token.text, self.kinds, n=1)
            self.fail(
                token,
                f"unknown kind of layer {token.text!r}",
                (f"did you mean {near[0]}? " if near else "") + f"the kinds are: {', '.join(sorted(self.kinds))}",
            )
        if not self.take("@"):
            return Kind(token.text)
        variant = self.take("name")
        if variant is None:
            self.fail(self.token, "a variant's name is expected after '@'", "name a key of model.variants")
        return Kind(token.text, variant.text)

    def role(self, kind: Kind) -> str:
        return self.kinds[kind.name].role


def parse(text: str, kinds: Mapping[str, HasRole] | None = None) -> list[BlockPattern]:
    """The blocks of a layer pattern, in order.

    Args:
        text: such as "(attention/mlp) x12".
        kinds: the known kinds by name. The default is all kinds of this package.

    Raises:
        PatternError: with the column, the rule and the fix.
    """
    reader = _Reader(text, kinds_of() if kinds is None else kinds)
    blocks = reader.stack(None)
    if reader.token.kind != "end":
        reader.fail(
            reader.token,
            f"{reader.token.text!r} does not belong here",
            "check the parentheses, and that 'x N' follows a block or a group",
        )
    return blocks


@lru_cache(maxsize=64)
def blocks_of(layers: str, extensions: tuple[str, ...] = ()) -> tuple[BlockPattern, ...]:
    """The blocks of a layer pattern, with the kinds that extensions add.

    Raises:
        PatternError: with the column, the rule and the fix.
        RegistryError: an extension cannot be used.
    """
    return tuple(parse(layers, kinds_of(extensions)))


@lru_cache(maxsize=64)
def names_of(layers: str, extensions: tuple[str, ...]) -> frozenset[str]:
    """Names of the kinds in a layer pattern. Errors as in `blocks_of`."""
    return frozenset(each.name for block in blocks_of(layers, extensions) for each in block.kinds)


@lru_cache(maxsize=8)
def call_numbers(blocks: tuple[BlockPattern, ...]) -> list[tuple[int, ...]]:
    """For each block and each kind added to its mixer: number of earlier blocks with the same one."""
    seen: dict[Kind, int] = {}
    numbers = []
    for block in blocks:
        numbers.append(tuple(seen.get(kind, 0) for kind in block.side))
        for kind in block.side:
            seen[kind] = seen.get(kind, 0) + 1
    return numbers
