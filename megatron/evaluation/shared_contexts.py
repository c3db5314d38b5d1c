"""Several endings of one context: the context is read once, and each ending from the state after it.

In multiple-choice tasks several endings follow the same text. Later tokens only need the layers' decoding state
after that text (keys and values, or a recurrent state), so each ending can begin from a copy."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.arithmetic.recurrence import core_of
from megatron.config.variants import used_kinds
from megatron.decoding.states import picked
from megatron.model.embedding_and_head import Reader

from ..engine.protocol import Engine, ReadsOn

WORTH = 4  # a group is read this way if at least 1 of 4 tokens is saved
PAD = 0  # the id after the end of a text. No result depends on it
Row = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A text whose last `scored` tokens are predicted, each from all tokens before it.

    Raises:
        ValueError: no token is scored, or none is before the first scored one.
    """

    tokens: Row
    scored: int

    def __post_init__(self) -> None:
        if not 0 < self.scored < len(self.tokens):
            raise ValueError(f"{self.scored} of {len(self.tokens)} tokens cannot be scored: one must stand before them")

    @property
    def inputs(self) -> Row:
        return self.tokens[:-1]

    @property
    def targets(self) -> Row:
        """The scored tokens. The first of them is predicted at position `len(inputs) - scored`."""
        return self.tokens[-self.scored :]


def states_at(x_BSH: Tensor, rows: list[int], places: list[int]) -> Tensor:
    """[N, H], the states at these places of these rows."""
    return x_BSH[torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)]


def scores_at(rows: list[int], places: list[int], labels: list[int]) -> Reader:
    """Reads the scores of the labels [N] from the states at these places of these rows."""
    labels_N = torch.tensor(labels, dtype=torch.int64)
    return lambda head, x_BSH: head.scores(states_at(x_BSH, rows, places), labels_N.to(x_BSH.device))


@dataclass(frozen=True)
class Group:
    """Texts with the same beginning."""

    context: Row  # the common beginning: everything before their scored tokens
    endings: dict[Row, list[int]]  # tokens read after it, without the last one -> the numbers of the texts


def split(texts: Sequence[Text]) -> tuple[list[Group], list[int]]:
    """The groups whose context is worth reading once, and the numbers of all other texts."""
    groups: dict[Row, dict[Row, list[int]]] = {}
    for index, text in enumerate(texts):
        cut = len(text.tokens) - text.scored
        groups.setdefault(text.tokens[:cut], {}).setdefault(text.tokens[cut:-1], []).append(index)
    found, others = [], []
    for context, endings in groups.items():
        saved, rest = (len(endings) - 1) * len(context), len(context) + sum(map(len, endings))
        if saved * WORTH >= saved + rest:
            found.append(Group(context, endings))
        else:
            others += [index for indices in endings.values() for index in indices]
    return found, sorted(others)


def depends_on_batch(config: Config) -> bool:
    """Whether a token's result depends on other texts of its batch: experts with a capacity, or experts that choose
    tokens."""
    return any(kind.mixes_samples(options) for _, kind, options in used_kinds(config.model))


def reads_on(config: Config, engine: Engine) -> bool:
    """Whether this engine can continue from a state. It cannot over pipeline stages or ranks that share the tokens
    of a text, nor through a recurrent core, whose passes have their own states. It cannot either if a token's result
    depends on other texts of the batch, or if states cannot be copied."""
    parallel = config.parallel
    if (
        depends_on_batch(config)
        or parallel.pipeline > 1
        or parallel.context > 1
        or parallel.sequence
        or not isinstance(engine, ReadsOn)
    ):
        return False
    return not core_of(config.model.blocks) and all(map(_copied, engine.new_state()))


@dataclass
class _Found:
    """Results of one text: log-probabilities of its scored tokens, and whether each is the likeliest."""

    logs: list[float] = field(default_factory=list)
    greedy: bool = True

    def add(self, log: float, best: bool) -> None:
        self.logs.append(log)
        self.greedy = self.greedy and best


class SharedContexts:
    """Reads groups. All ranks call `read` together with the same groups.

    Args:
        data: (rank, size) of the data axis. Its ranks make the same number of passes, as ZeRO 3 and experts need.

    Attributes:
        tokens: number of tokens that this rank has read, padding included.
    """

    def __init__(self, engine: ReadsOn, rows: int, data: tuple[int, int], device: torch.device) -> None:
        self.engine, self.rows, self.device = engine, rows, device
        self.rank, self.ranks = data
        self.tokens = 0

    def read(self, groups: Sequence[Group], texts: Sequence[Text]) -> dict[int, tuple[list[float], bool]]:
        """The results of each text that this rank has read, by its number: the log-probabilities of its scored
        tokens, and whether all of them are the likeliest."""
        bundles, found = list(self._bundles(groups)), dict[int, _Found]()
        for begin in range(0, len(bundles), self.ranks):
            step = bundles[begin : begin + self.ranks]
            passes = max(-(-sum(len(_longer(group)) for group in bundle) // self.rows) for bundle in step)
            own = step[self.rank] if self.rank < len(step) else []
            self._read(own, passes, texts, found)
        return {index: (each.logs, each.greedy) for index, each in found.items()}

    def _bundles(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Groups that are read together: contexts of one length, with at most `rows` endings."""
        bundle: list[Group] = []
        for group in sorted(groups, key=lambda each: (-len(each.context), each.context)):
            count = len(group.endings) + sum(len(each.endings) for each in bundle)
            if bundle and (len(bundle[0].context) != len(group.context) or count > self.rows):
                yield bundle
                bundle = []
            bundle.append(group)
        if bundle:
            yield bundle

    def _read(self, bundle: list[Group], passes: int, texts: Sequence[Text], found: dict[int, _Found]) -> None:
        """Read the contexts, and then their endings in `passes` passes. A rank without endings reads padding."""
        firsts = [(row, i) for row, group in enumerate(bundle) for indices in group.endings.values() for i in indices]
        contexts = [group.context for group in bundle] or [(PAD,)]
        length, state = len(contexts[0]), self.engine.new_state()
        asked = [(row, length - 1, index, 0) for row, index in firsts]
        self._pass(contexts, asked, texts, found, state, 0)
        rows = [(row, each) for row, group in enumerate(bundle) for each in _longer(group)]
        for number in range(passes):
            chosen = rows[number * self.rows : (number + 1) * self.rows]
            asked = [
                (at_row, place - 1, index, place)
                for at_row, (row, ending) in enumerate(chosen)
                for index in bundle[row].endings[ending]
                for place in range(1, texts[index].scored)
            ]
            origin = torch.tensor([row for row, _ in chosen] or [0], device=self.device)
            endings = [ending for _, ending in chosen] or [(PAD,)]
            self._pass(endings, asked, texts, found, [picked(each, origin) for each in state], length)

    def _pass(
        self,
        rows: Sequence[Row],
        asked: list[tuple[int, int, int, int]],
        texts: Sequence[Text],
        found: dict[int, _Found],
        state: list[Any],
        begin: int,
    ) -> None:
        """Read rows from a state, and note results: (row, place, number of a text, number of its scored token)."""
        tokens = torch.full((len(rows), max(map(len, rows))), PAD, dtype=torch.int64)
        for row, own in enumerate(rows):
            tokens[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        self.tokens += tokens.numel()
        labels = [texts[index].targets[number] for _, _, index, number in asked]
        reader = scores_at([row for row, *_ in asked], [place for _, place, *_ in asked], labels)
        logs_N, best_N = self.engine.read_on(tokens.to(self.device), reader, state, begin)
        for (_, _, index, _), label, log, best in zip(asked, labels, logs_N.double().tolist(), best_N.tolist()):
            found.setdefault(index, _Found()).add(log, best == label)


def _longer(group: Group) -> list[Row]:
    """The endings with tokens to read after the context."""
    return [ending for ending in group.endings if ending]


def _copied(state: Any) -> bool:
    """Whether `picked` copies such a state. It does not copy unknown objects."""
    if isinstance(state, dict):
        return all(map(_copied, state.values()))
    if isinstance(state, tuple | list):
        return all(map(_copied, state))
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return all(_copied(getattr(state, each.name)) for each in dataclasses.fields(state))
    return state is None or isinstance(state, Tensor | int | float | str | bool)
