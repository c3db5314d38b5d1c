"""Log-likelihoods and continuations of texts by a model that lies on any layout.

Every rank calls the methods of `Scorer` with the same texts and gets the same results. Which data parallel rank
computes a text follows from the texts alone. In a batch, texts are padded on the right, where causal layers do not
look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import Reader
from megatron.model.generate import Sampling, choose_token
from megatron.parallel.mesh import Mesh

from .protocol import Engine

PAD = 0  # the id behind the end of a text; no result depends on it
LENGTHS = 32  # lengths of batches are multiples of this, so that few shapes occur
Row = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A text whose last `scored` tokens are predicted, each from all that stands before it.

    Raises:
        ValueError: no token is scored, or nothing stands before the first one that is.
    """

    tokens: Row
    scored: int

    def __post_init__(self) -> None:
        if not 0 < self.scored < len(self.tokens):
            raise ValueError(f"{self.scored} of {len(self.tokens)} tokens cannot be scored: one must stand before them")

    @property
    def inputs(self) -> Row:
        """What the model reads."""
        return self.tokens[:-1]

    @property
    def targets(self) -> Row:
        """The scored tokens. The first of them is predicted at position `len(inputs) - scored`."""
        return self.tokens[-self.scored :]


@dataclass(frozen=True)
class Score:
    """The sum of the scored tokens' log-probabilities in nats, and whether each is the likeliest token in its place."""

    log_likelihood: float
    greedy: bool


def depends_on_batch(config: Config) -> bool:
    """Whether a token's result depends on other texts of its batch: experts with a capacity, or that choose tokens."""
    return any(kind.mixes_samples(options) for _, kind, options in used_kinds(config.model))


class Scorer:
    """Scores and continues texts. All ranks call its methods together, with the same arguments.

    Args:
        texts: in a micro-batch. Models in which the texts of a batch see each other get one.
    """

    def __init__(self, config: Config, engine: Engine, mesh: Mesh, device: torch.device, *, texts: int = 16):
        self.config, self.engine, self.mesh, self.device = config, engine, mesh, device
        self.texts = 1 if depends_on_batch(config) else texts
        self.reports = mesh.at.tensor == mesh.at.context == 0 and mesh.at.pipeline == mesh.pipeline.size - 1

    def score(self, texts: Sequence[Text]) -> list[Score]:
        """The score of each text. What several texts have in common up to their last token is computed once."""
        same: dict[Row, list[int]] = {}
        for index, text in enumerate(texts):
            same.setdefault(text.inputs, []).append(index)
        found = torch.zeros(len(texts), 2, dtype=torch.float64)
        for step in self._steps(sorted(same, key=lambda row: (-len(row), row))):
            asked = [[(at, index) for at, row in enumerate(rows) for index in same.get(row, ())] for rows in step]
            readers = [self._scores([(at, texts[index]) for at, index in each]) for each in asked]
            for each, (logs_N, best_N) in zip(asked, self._read(step, readers)):
                logs, best, begin = logs_N.double().tolist(), best_N.tolist(), 0
                for _, index in each:
                    targets = texts[index].targets
                    end = begin + len(targets)
                    found[index, 0] = math.fsum(logs[begin:end])
                    found[index, 1] = best[begin:end] == list(targets)
                    begin = end
        return [Score(log_likelihood, bool(greedy)) for log_likelihood, greedy in self._sum(found).tolist()]

    def generate(
        self,
        prompts: Sequence[Row],
        tokens: int,
        sampling: Sampling,
        finished: Callable[[list[int]], bool],
        vocabulary: int | None = None,
    ) -> list[list[int]]:
        """What follows each prompt: up to `tokens` tokens, or fewer once `finished` holds of those that were made.

        Draws are keyed by the number of the prompt and the position, so they depend on neither batch nor layout. The
        whole text is read for each token, which works on every layout.

        Args:
            vocabulary: only ids below it are chosen; the embedding may have more rows than the tokenizer has ids.
        """
        made: list[list[int]] = [[] for _ in prompts]
        together = self.texts * self.mesh.data.size * self.mesh.pipeline.size
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
        for begin in range(0, len(order), together):
            active = order[begin : begin + together]
            for _ in range(tokens):
                texts = [(index, (*prompts[index], *made[index])) for index in active]
                for index, token in zip(active, self._next(texts, sampling, vocabulary)):
                    made[index].append(token)
                active = [index for index in active if not finished(made[index])]
                if not active:
                    break
        return made

    def _next(self, texts: list[tuple[int, Row]], sampling: Sampling, vocabulary: int | None) -> list[int]:
        """The token that follows each (number of a prompt, text)."""
        places = {row: [place for place, (_, other) in enumerate(texts) if other == row] for _, row in texts}
        found = torch.zeros(len(texts), dtype=torch.float64)
        for step in self._steps(sorted(places, key=lambda row: (-len(row), row))):
            real = [[row for row in rows if row] for rows in step]
            for rows, logits_NV in zip(real, self._read(step, [self._last_logits(rows) for rows in real])):
                for row, logits_V in zip(rows, logits_NV):
                    for place in places[row]:
                        token = choose_token(
                            logits_V[:vocabulary].unsqueeze(0), sampling, len(row), first=texts[place][0]
                        )
                        found[place] = float(token)
        return [int(token) for token in self._sum(found).tolist()]

    def _steps(self, rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
        """This rank's micro-batches of each step, as many on all ranks and of as many rows; () where none is left."""
        data, micros = self.mesh.data, self.mesh.pipeline.size  # as many micro-batches as stages keep all of them busy
        for begin in range(0, len(rows), self.texts * data.size * micros):
            whole = list(rows[begin : begin + self.texts * data.size * micros])
            micros_here = min(micros, -(-len(whole) // data.size))
            whole += [()] * (-len(whole) % (data.size * micros_here))
            own = whole[data.rank :: data.size]
            yield [own[micro::micros_here] for micro in range(micros_here)]

    def _read(self, step: list[list[Row]], readers: list[Reader]) -> list[Any]:
        """What the readers find in a step's micro-batches; nothing on ranks that do not report."""
        longest = torch.tensor([max((len(row) for rows in step for row in rows), default=1)], device=self.device)
        if self.mesh.data.size > 1:
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.mesh.data.group)
        found = self.engine.read(self._batch(step, self._length(int(longest))), readers)
        return found if self.reports else []

    def _length(self, longest: int) -> int:
        """The length of a batch: every tensor and context parallel rank can have an equal part of it."""
        ranks = self.mesh.context.size * (self.mesh.tensor.size if self.mesh.layout.sequence else 1)
        length = -(-longest // math.lcm(LENGTHS, ranks)) * math.lcm(LENGTHS, ranks)
        embedding = self.config.model.embedding
        if embedding.position == "learned":  # there is no position behind the last one
            length = max(min(length, embedding.max_positions // ranks * ranks), longest)
        return length

    def _batch(self, step: list[list[Row]], length: int) -> StepBatch:
        tokens = torch.full((len(step), len(step[0]), length + 1), PAD, dtype=torch.int64)
        for micro, rows in enumerate(step):
            for at, row in enumerate(rows):
                tokens[micro, at, : len(row)] = torch.tensor(row, dtype=torch.int64)
        documents = positions = None
        if self.config.data.reset_attention_at_eod:  # each text is one document
            documents = torch.zeros(len(step), len(step[0]), length, dtype=torch.int32)
            positions = torch.arange(length, dtype=torch.int32).expand_as(documents).contiguous()
        sample_ids = torch.zeros(len(step), len(step[0]), dtype=torch.int64)  # there is no dropout
        return StepBatch(0, tokens, sample_ids, 0, None, documents, positions)

    def _scores(self, texts: list[tuple[int, Text]]) -> Reader:
        """Scores of (row, text), one text's tokens after another's."""
        rows = [at for at, text in texts for _ in text.targets]
        places = [len(text.inputs) - text.scored + number for _, text in texts for number in range(text.scored)]
        labels = torch.tensor([token for _, text in texts for token in text.targets], dtype=torch.int64)
        return lambda head, x_BSH: head.scores(_at(x_BSH, rows, places), labels.to(x_BSH.device))

    @staticmethod
    def _last_logits(rows: list[Row]) -> Reader:
        """Logits [rows, V] of what follows the first rows of the batch."""
        return lambda head, x_BSH: head.logits_at(_at(x_BSH, list(range(len(rows))), [len(row) - 1 for row in rows]))

    def _sum(self, found: torch.Tensor) -> torch.Tensor:
        """Results of all ranks: each is known to one of them and zero elsewhere, so nothing is rounded."""
        if self.mesh.layout.world_size == 1:
            return found
        found = found.to(self.device)
        dist.all_reduce(found)
        return found.cpu()


def _at(x_BSH: torch.Tensor, rows: list[int], places: list[int]) -> torch.Tensor:
    """[N, H], the states at these places of these rows."""
    return x_BSH[torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)]
