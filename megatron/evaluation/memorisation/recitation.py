"""Measures how much of a sequence a model recites from its beginning.

Biderman et al., "Emergent and Predictable Memorization in Large Language Models" (2023), arXiv 2304.11158: the model
reads the first k tokens of a training sequence and continues greedily. The memorisation score is the share of the next
l tokens that are the sequence's own, place by place. A sequence of score 1 is extractable (Carlini et al. 2022).

A score is 1 if and only if each of the l tokens is the likeliest one after the true tokens before it. The continuation
equals the true text as long as it is right, so one pass decides that. So only sequences that are not extractable are
continued token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.decoding.schedule import Request
from megatron.evaluation.scoring import Row, Scorer, Text


@dataclass(frozen=True)
class Recital:
    """A model's recitation of one sequence.

    Attributes:
        extractable: whether its greedy continuation is the sequence's own.
        score: share of the continuation's right tokens. None if not extractable, and scores were not asked for.
        log_likelihood: of the sequence's own continuation, in nats.
    """

    extractable: bool
    score: float | None
    log_likelihood: float


def recite(scorer: Scorer, rows: Sequence[Row], context: int, *, scores: bool = True) -> list[Recital]:
    """The recitals of sequences. Repeated sequences are computed once. All ranks call it with the same ones.

    Args:
        rows: k + l tokens each.
        context: k.
        scores: also continue sequences that are not extractable, which costs up to l passes instead of one.
    """
    different = list(dict.fromkeys(rows))
    found = dict(zip(different, _recite(scorer, different, context, scores), strict=True))
    return [found[row] for row in rows]


def _recite(scorer: Scorer, rows: Sequence[Row], context: int, scores: bool) -> list[Recital]:
    length = len(rows[0]) - context if rows else 0
    read = scorer.score([Text(row, length) for row in rows])
    others = [number for number, each in enumerate(read) if scores and not each.greedy]
    made = scorer.answer([Request(rows[number][:context], length) for number in others])
    right: dict[int, float] = {
        number: sum(own == true for own, true in zip(each.tokens, rows[number][context:], strict=True)) / length
        for number, each in zip(others, made, strict=True)
    }
    return [
        Recital(each.greedy, 1.0 if each.greedy else right.get(number), each.log_likelihood)
        for number, each in enumerate(read)
    ]
