"""Evaluations by several answers to a problem: majority voting, and Markovian RSA (ZAYA1, arXiv 2605.05365).

Markovian RSA draws N candidates of a problem and keeps the last tokens of each, its tail. In each later round all N
candidates are drawn again, each after the problem with some of the tails. No prompt grows with the rounds. With
`rounds: 0` it is parallel sampling, with tails of whole candidates recursive self-aggregation, and with one tail a
chain of continuations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean
from typing import TYPE_CHECKING

from megatron.config.problems import UserError
from megatron.data.hashing import generator

from .problems import Prompt
from .rewards import NUMBER

if TYPE_CHECKING:
    from .hook import AlignHook
    from .sampler import Drawn


def answer_of(text: str, kind: str) -> str | Decimal | None:
    """The part of a completion that is compared in a vote: all of it, or the value of its last number. None if there is
    none."""
    if kind == "text":
        return text.strip() or None
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def majority(answers: Sequence[str | Decimal | None]) -> int:
    """The place of the first of the most frequent answers. None has no vote, and ties go to the first."""
    votes = Counter[str | Decimal | None](each for each in answers if each is not None)
    return max(range(len(answers)), key=lambda place: (votes[answers[place]], -place))


def filled(template: str, tails: str, problem: str) -> str:
    """A template with its parts. Braces in a model's own text are kept."""
    return re.sub(r"\{(?:tails|problem)\}", lambda part: tails if part[0] == "{tails}" else problem, template)


class Voting:
    """Draws at temperature 1 with the program's sampler, server and rewards."""

    def __init__(self, program: AlignHook) -> None:
        self.program, self.own = program, program.own
        self.seed, self.numbers = program.config.training.seed, 0

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Mean rewards over the problems: of all first candidates, of the majority's answer, of the best one, and
        with aggregation of all last candidates and of their majority."""
        candidates = self.draw(prompts, [prompt.ids for prompt in prompts for _ in range(self.own.votes)])
        found = self.judged(prompts, candidates)
        numbers = {"single": found[0], "majority": found[1], "best": found[2]}
        given = self.own.aggregate
        for number in range(given.rounds):
            candidates = self.draw(prompts, self.aggregated(prompts, candidates, number))
        if given.rounds:
            numbers["aggregated"], numbers["aggregated_majority"], _ = self.judged(prompts, candidates)
        return numbers

    def draw(self, prompts: Sequence[Prompt], ids: Sequence[tuple[int, ...]]) -> list[Drawn]:
        begin, self.numbers = self.numbers, self.numbers + len(ids)
        return self.program.draw(ids, range(begin, begin + len(ids)), self.program.rule(self.seed, "votes"))

    def judged(self, prompts: Sequence[Prompt], candidates: Sequence[Drawn]) -> tuple[float, float, float]:
        size, texts = self.own.votes, [self.program.text(each) for each in candidates]
        verdicts = self.program.verify([prompt for prompt in prompts for _ in range(size)], candidates)
        rewards = [each.reward for each in verdicts]
        answers = [answer_of(text, self.own.vote_on) for text in texts]
        begins = range(0, len(texts), size)
        won = [rewards[begin + majority(answers[begin : begin + size])] for begin in begins]
        best = [max(rewards[begin : begin + size]) for begin in begins]
        return fmean(rewards), fmean(won), fmean(best)

    def aggregated(self, prompts: Sequence[Prompt], candidates: Sequence[Drawn], number: int) -> list[tuple[int, ...]]:
        """The prompts of a round: each problem, for each of its new candidates, with tails of the last candidates."""
        size, given, found = self.own.votes, self.own.aggregate, list[tuple[int, ...]]()
        tokenizer = self.program.tokenizer
        room = self.program.config.training.sequence_length + 1 - self.own.tokens
        for place, prompt in enumerate(prompts):
            own = candidates[place * size : (place + 1) * size]
            tails = [tokenizer.decode([t for t in each.tokens if t != tokenizer.eod_id][-given.tail :]) for each in own]
            for candidate in range(size):
                draw = generator(self.seed, "aggregate", number, place, candidate)
                chosen = sorted(draw.choice(size, min(given.tails, size), replace=False).tolist())
                shown = "\n".join(tails[each] for each in chosen)
                ids = tuple(tokenizer.encode(filled(given.template, shown, prompt.text)))
                if len(ids) > room:
                    raise UserError(
                        f"align.aggregate: a prompt with {given.tails} tails has {len(ids)} tokens, and must have at "
                        f"most {room}. Use fewer tails, a smaller align.aggregate.tail, or a longer "
                        "training.sequence_length"
                    )
                found.append(ids)
        return found
