"""Texts that the model continues by drawing, with the log-probability of each token. On any layout.

Draws are keyed by (seed, number of the text, position). So a text does not depend on the layout, on the texts around it
or on a restart, as far as the rounding of its logits does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.routes import route_columns
from megatron.decoding.covered import obstacle
from megatron.decoding.sampling import GREEDY, Sampling
from megatron.decoding.schedule import Drawn, Request
from megatron.evaluation.scoring import Scorer
from megatron.evaluation.shared_contexts import Row, Text
from megatron.model.embedding_and_head import Reader
from megatron.model.expert_tally import recorded

__all__ = ["Drawn", "Rule", "Sampler"]


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen."""

    tokens: int  # the largest number
    finished: Callable[[list[int]], bool]  # whether a continuation has ended, from its ids
    vocabulary: int | None  # only ids below it are chosen, and have probability
    sampling: Sampling = GREEDY  # by draws of the policy itself, or the likeliest
    routes: bool = False  # whether the experts of the tokens that were read are kept

    @staticmethod
    def of(seed: int, **more: Any) -> "Rule":
        return Rule(sampling=Sampling(seed=seed, purpose="rollouts"), **more)


class Sampler(Scorer):
    """Continues prompts, and scores texts. All ranks call its methods together, with the same arguments."""

    def draw(self, prompts: Sequence[Row], numbers: Sequence[int], rule: Rule) -> list[Drawn]:
        """The continuation of each prompt. `numbers` key the draws."""
        requests = [
            Request(prompt, rule.tokens, number, rule.sampling, rule.finished)
            for prompt, number in zip(prompts, numbers)
        ]
        return self.answer(requests, rule.vocabulary, routes=self.width if rule.routes else 0)

    @property
    def width(self) -> int:
        """Experts of a token in all layers."""
        return sum(map(len, route_columns(self.config.model).values()))

    @property
    def exact(self) -> bool:
        """Whether the decoder reads texts, on CPUs, where a text's log-probabilities have the same bits each time."""
        return self.cached and self.device.type == "cpu"

    def note(self) -> str:
        """How texts are drawn, and what was found out about their log-probabilities by a trial."""
        if (reason := obstacle(self.config)) is not None:
            return f"rollouts: texts are read again for each token, since {reason}"
        if not self.exact:
            return "rollouts: log-probabilities do not depend on other texts, and equal the trainer's, within rounding"
        size = min(self.config.model.vocab_size, 97)
        lengths = [min(length, self.config.training.sequence_length - 2) for length in (3, 40, 17, 33, 3)]
        asked = [
            Request(tuple((7 * place + 3 * each) % size for place in range(max(length, 1))), 3, each)
            for each, length in enumerate(lengths)
        ]
        together, alone = self.answer(asked), [self.answer([each])[0] for each in asked]
        texts = [Text((*one.prompt, *each.tokens), len(each.tokens)) for one, each in zip(asked, alone)]

        def apart(scores: Sequence[Sequence[float]]) -> float:
            return max(abs(a - b) for each, own in zip(alone, scores) for a, b in zip(each.log_p, own))

        same = "do not depend on other texts, bit for bit" if together == alone else "depend on other texts by rounding"
        again, whole = apart(self.log_probabilities(texts)), apart(self.of_whole_texts(texts))
        equal = "equal their scores" if again == 0.0 else f"differ from their scores by up to {again:.1e}"
        return (
            f"rollouts: log-probabilities {same}, and {equal}. Training passes differ from them by up to "
            f"{whole:.1e} in a trial"
        )

    def log_probabilities(self, texts: Sequence[Text], vocabulary: int | None = None) -> list[list[float]]:
        """The log-probability of each scored token of each text: as they are drawn where that is `exact`, and
        otherwise as a training pass reads the text.

        Args:
            vocabulary: as in `Rule`. Training passes give all rows of the head probability.
        """
        if not self.exact:
            return self.of_whole_texts(texts)
        asked = [Request(text.tokens, 0, number, scored=text.scored) for number, text in enumerate(texts)]
        return [each.scores for each in self.answer(asked, vocabulary)]

    routes: dict[Row, list[torch.Tensor]] | None = None  # experts [tokens, k] of each layer, of texts read by this rank

    def _read(self, step: list[list[Row]], readers: list[Reader]) -> list[Any]:
        if self.routes is None:
            return super()._read(step, readers)
        engine: Any = self.engine
        with recorded(engine.model) as layers:
            found = super()._read(step, readers)
        for number, rows in enumerate(step if self.reports else ()):
            passes = [each[number].unflatten(0, (len(rows), -1)).cpu() for each in layers.values()]
            self.routes |= {row: [each[at, : len(row)] for each in passes] for at, row in enumerate(rows) if row}
        return found

    def with_routes(self, texts: Sequence[Text]) -> tuple[list[list[float]], list[torch.Tensor]]:
        """`of_whole_texts`, and the experts int64 [tokens - 1, all layers' k] that each text used there."""
        self.routes = {}
        logs = self.of_whole_texts(texts)
        own, self.routes = self.routes, None
        found = torch.zeros(len(texts), max(len(text.inputs) for text in texts), self.width, dtype=torch.int32)
        for index, text in enumerate(texts):
            # of equal texts one rank has read one
            if text.inputs in own:
                found[index, : len(text.inputs)] = torch.cat(own[text.inputs], 1).int()
        return logs, [row[: len(text.inputs)].long() for row, text in zip(self._sum(found), texts)]

    def of_whole_texts(self, texts: Sequence[Text]) -> list[list[float]]:
        """The log-probability of each scored token of each text, read as a training pass reads it."""
        found = torch.zeros(len(texts), max(text.scored for text in texts), dtype=torch.float64)
        for index, logs, _ in self._read_whole(texts, range(len(texts))):
            found[index, : len(logs)] = torch.tensor(logs, dtype=torch.float64)
        return [row[: text.scored] for row, text in zip(self._sum(found).tolist(), texts)]
