"""Texts that the model continues by drawing, with the log-probability of each token. On any layout.

Draws are keyed by (seed, number of the text, position). So a text does not depend on the layout, on the texts around it
or on a restart, as far as the rounding of its logits does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import Config
from megatron.engine.protocol import Engine, ReadsOn
from megatron.evaluation.scoring import Scorer
from megatron.evaluation.shared_contexts import PAD, Row, Text, depends_on_batch, picked, reads_on
from megatron.model.embedding_and_head import Head, Reader
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.random import site_key, uniform


@dataclass
class Drawn:
    """A continuation: its ids, their log-probabilities, and whether it ended before the largest length."""

    tokens: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen.

    Attributes:
        tokens: the largest number.
        finished: whether a continuation has ended, from its ids.
        vocabulary: only ids below it are chosen, and have probability.
        key: of the draws. None takes the likeliest token.
    """

    tokens: int
    finished: Callable[[list[int]], bool]
    vocabulary: int | None
    key: int | None

    @staticmethod
    def of(seed: int, **more: object) -> Rule:
        return Rule(key=site_key(seed, "rollouts"), **more)  # type: ignore[arg-type]

    def choose(self, logits_NV: Tensor, numbers: Sequence[int], position: int) -> tuple[list[int], list[float]]:
        """The token of each text at a position, and its log-probability in float64."""
        logs_NV = logits_NV[:, : self.vocabulary].double().log_softmax(-1)
        if self.key is None:
            ids_N = logs_NV.argmax(-1)
        else:
            texts, place = (torch.tensor(each, device=logs_NV.device) for each in (list(numbers), [position]))
            draw_N1 = uniform(self.key, texts, place).double()
            ids_N = (logs_NV.exp().cumsum(-1) <= draw_N1).sum(-1).clamp(max=logs_NV.shape[-1] - 1)
        return ids_N.tolist(), logs_NV.gather(1, ids_N[:, None])[:, 0].tolist()


class Sampler(Scorer):
    """Continues prompts, and scores texts. All ranks call its methods together, with the same arguments.

    Where the layout permits it (`reads_on`), prompts of one length are read together and each token continues from the
    layers' states. On others (pipelines, shared sequences) the whole text is read for each token.

    Attributes:
        alive: called after each pass, since a round may take longer than a rank is given for one phase.
    """

    def __init__(self, config: Config, engine: Engine, mesh: Mesh, device: torch.device, *, texts: int) -> None:
        super().__init__(config, engine, mesh, device, texts=texts)
        self.alive: Callable[[], None] = lambda: None
        self.cached = isinstance(engine, ReadsOn) and not depends_on_batch(config) and reads_on(config, engine)

    def draw(self, prompts: Sequence[Row], numbers: Sequence[int], rule: Rule) -> list[Drawn]:
        """The continuation of each prompt. `numbers` key the draws."""
        made = [Drawn() for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), prompts[index], index))
        if not self.cached:
            together = self.texts * self.mesh.data.size * self.mesh.pipeline.size
            for begin in range(0, len(order), together):
                self._draw_whole(order[begin : begin + together], prompts, numbers, rule, made)
            return made
        bundles: list[list[int]] = []
        for index in order:
            if not bundles or len(bundles[-1]) == self.texts or len(prompts[bundles[-1][0]]) != len(prompts[index]):
                bundles.append([])
            bundles[-1].append(index)
        for begin in range(0, len(bundles), self.mesh.data.size):
            step = bundles[begin : begin + self.mesh.data.size]
            self._draw_cached(
                step[self.mesh.data.rank] if self.mesh.data.rank < len(step) else [], prompts, numbers, rule, made
            )
        self._exchange(made, rule.tokens)
        return made

    def _draw_cached(
        self, own: list[int], prompts: Sequence[Row], numbers: Sequence[int], rule: Rule, made: list[Drawn]
    ) -> None:
        """Continue prompts of one length, on this data parallel rank. A rank without prompts reads padding."""
        assert isinstance(self.engine, ReadsOn)
        rows = list(dict.fromkeys(prompts[index] for index in own)) or [(PAD,)]
        begin, state, active = len(rows[0]), self.engine.new_state(), own
        ids = torch.tensor(rows, dtype=torch.int64, device=self.device)
        logits = self.engine.read_on(ids, _last, state, 0)
        origin = torch.tensor([rows.index(prompts[index]) for index in own] or [0], device=self.device)
        logits, state = logits.index_select(0, origin), [picked(each, origin) for each in state]
        for place in range(rule.tokens):
            if active:
                chosen = rule.choose(logits, [numbers[index] for index in active], begin + place)
                for index, token, log_p in zip(active, *chosen):
                    made[index].tokens.append(token)
                    made[index].log_p.append(log_p)
                    made[index].ended = rule.finished(made[index].tokens)
            kept = [row for row, index in enumerate(active) if not made[index].ended]
            if place + 1 == rule.tokens or not self._any_left(bool(kept)):
                break
            if len(kept) < len(active) or not active:
                rows_left = torch.tensor(kept or [0], device=self.device)
                state = [picked(each, rows_left) for each in state]
                active = [active[row] for row in kept]
            self.alive()
            newest = [made[index].tokens[-1:] for index in active] or [[PAD]]
            logits = self.engine.read_on(torch.tensor(newest, device=self.device), _last, state, begin + place)

    def _any_left(self, own: bool) -> bool:
        """Whether any data parallel rank has a text that has not ended. All make the same number of passes."""
        if self.mesh.data.size == 1:
            return own
        flag = torch.tensor([float(own)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.mesh.data.group)
        return bool(flag.item())

    def _exchange(self, made: list[Drawn], tokens: int) -> None:
        """Send each rank's texts to all ranks."""
        if self.mesh.layout.world_size == 1:
            return
        found = torch.zeros(len(made), 2 * tokens + 2, dtype=torch.float64)
        for row, each in enumerate(made if self.reports else ()):
            count = len(each.tokens)
            found[row, :2] = torch.tensor([count, each.ended], dtype=torch.float64)
            found[row, 2 : 2 + count] = torch.tensor(each.tokens, dtype=torch.float64)
            found[row, 2 + tokens : 2 + tokens + count] = torch.tensor(each.log_p, dtype=torch.float64)
        for each, row in zip(made, self._sum(found).tolist()):
            count = int(row[0])
            each.tokens = [int(token) for token in row[2 : 2 + count]]
            each.log_p, each.ended = row[2 + tokens : 2 + tokens + count], bool(row[1])

    def _draw_whole(
        self, active: list[int], prompts: Sequence[Row], numbers: Sequence[int], rule: Rule, made: list[Drawn]
    ) -> None:
        """Continue prompts by reading the whole texts for each token."""
        for _ in range(rule.tokens):
            places: dict[Row, list[int]] = {}
            for index in active:
                places.setdefault((*prompts[index], *made[index].tokens), []).append(index)
            found = torch.zeros(len(made), 2, dtype=torch.float64)
            for step in self._steps(sorted(places, key=lambda row: (-len(row), row))):
                real = [[row for row in rows if row] for rows in step]
                for rows, logits_NV in zip(real, self._read(step, [self._last_logits(rows) for rows in real])):
                    for row, logits_V in zip(rows, logits_NV):
                        own = places[row]
                        logits = logits_V.expand(len(own), -1)
                        chosen = rule.choose(logits, [numbers[index] for index in own], len(row))
                        found[own] = torch.tensor(chosen, dtype=torch.float64).T
            for index, (token, log_p) in enumerate(self._sum(found).tolist()):
                if index in active:
                    made[index].tokens.append(int(token))
                    made[index].log_p.append(log_p)
                    made[index].ended = rule.finished(made[index].tokens)
            self.alive()
            active = [index for index in active if not made[index].ended]
            if not active:
                break

    def log_probabilities(self, texts: Sequence[Text]) -> list[list[float]]:
        """The log-probability of each scored token of each text, as the trainer reads it."""
        found = torch.zeros(len(texts), max(text.scored for text in texts), dtype=torch.float64)
        same: dict[Row, list[int]] = {}
        for index, text in enumerate(texts):
            same.setdefault(text.inputs, []).append(index)
        for step in self._steps(sorted(same, key=lambda row: (-len(row), row))):
            asked = [[(at, index) for at, row in enumerate(rows) for index in same.get(row, ())] for rows in step]
            self.alive()
            readers: list[Reader] = [self._scores([(at, texts[index]) for at, index in each]) for each in asked]
            for each, (logs_N, _) in zip(asked, self._read(step, readers)):
                logs, begin = logs_N.double().cpu(), 0
                for _, index in each:
                    count = texts[index].scored
                    found[index, :count] = logs[begin : begin + count]
                    begin += count
        return [row[: text.scored] for row, text in zip(self._sum(found).tolist(), texts)]


def _last(head: Head, x_BSH: Tensor) -> Tensor:
    """Logits [B, V] of the token after each row."""
    return head.logits_at(x_BSH[:, -1])
