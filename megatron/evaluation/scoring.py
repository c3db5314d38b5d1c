"""Log-likelihoods and continuations of texts by a model on any layout.

Every rank calls the methods of `Scorer` with the same texts and gets the same results. The data parallel rank that
computes a text follows only from the texts. In a batch, texts are padded on the right, which causal layers do not see.

One rank asks, all ranks compute: the harness only runs on rank 0, and the others follow it. So tasks are loaded, texts
tokenised and results kept once, and the harness need not know any layout."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.format.communicator import Communicator
from megatron.config import Config
from megatron.config.arithmetic.pipelines import ranks_of_stages
from megatron.config.registry import load
from megatron.config.sequences import longest_text
from megatron.config.variants import used_kinds
from megatron.data.batch import StepBatch
from megatron.data.tokenizer import Tokenizer
from megatron.decoding.covered import obstacle
from megatron.decoding.decoder import Decoder, largest_of, next_tokens, run_together
from megatron.decoding.read_less import Factory, of_evaluation
from megatron.decoding.sampling import Sampling, ending
from megatron.decoding.schedule import Drawn, Request, RequestError, is_over
from megatron.engine.protocol import Engine, ReadsOn
from megatron.model.embedding_and_head import Reader
from megatron.parallel.layout.mesh import Mesh

from .shared_contexts import PAD, Row, SharedContexts, Text, depends_on_batch, reads_on, scores_at, split, states_at

LENGTHS = 32  # lengths of batches are multiples of this, so that few shapes occur


@dataclass(frozen=True)
class Score:
    """The sum of the scored tokens' log-probabilities in nats, and whether each is the likeliest token in its place."""

    log_likelihood: float
    greedy: bool


class Scorer:
    """Scores and continues texts. All ranks call its methods together, with the same arguments.

    Args:
        texts: in a micro-batch. Models in which the texts of a batch interact get one.
        exact: the decoder scores texts, as it draws them.
        reading: as in `Decoder`. Texts are then scored by the decoder too.

    Attributes:
        tokens: number of tokens that this rank has read, padding included.
        cached: whether the decoder continues texts.
        continues: whether a class of transformers does.
        alive: called after each pass over texts, since many may take longer than a rank is given for one phase.
        staying: the engine of a decoder that all ranks run with the same requests, whose tokens stay with their
            experts.
    """

    alive: Callable[[], None]

    def __init__(
        self,
        config: Config,
        engine: Engine,
        mesh: Mesh,
        device: torch.device,
        *,
        texts: int = 16,
        exact: bool = False,
        reading: Factory | None = None,
    ):
        self.reading, self.by_decoder = reading, exact or reading is not None
        self.staying: ReadsOn | None = None
        self.config, self.engine, self.mesh, self.device = config, engine, mesh, device
        self.texts = 1 if depends_on_batch(config) else texts
        self.tokens = 0
        self.endings: SharedContexts | None = None
        if isinstance(engine, ReadsOn) and reads_on(config, engine):
            self.endings = SharedContexts(engine, self.texts, (mesh.data.rank, mesh.data.size), device)
        self.cached, self.alive = obstacle(config) is None and isinstance(engine, ReadsOn), lambda: None
        alone = mesh.layout.world_size == mesh.replicas.size and config.parallel.context == 1 and config.zero.stage < 3
        self.continues = alone and any(kind.whole for _, kind, _ in used_kinds(config.model))
        self.last = ranks_of_stages(config.parallel)[-1]
        self.reports = mesh.at.tensor == mesh.at.context == 0 and mesh.at.pipeline == self.last

    @classmethod
    def of_tasks(
        cls, config: Config, engine: Engine, mesh: Mesh, device: torch.device, texts: int, moves: bool = False
    ) -> "Scorer":
        """A scorer for tasks, which reads as `evaluation` says.

        Args:
            moves: whether experts may be moved to the ranks of `evaluation.placement`. The engine can then not train.

        Raises:
            UserError: a file of components or of places is not of this model.
        """
        reading, path = of_evaluation(config, device, mesh), config.evaluation.placement
        made = cls(config, engine, mesh, device, texts=texts, exact=config.evaluation.exact, reading=reading)
        if moves and path is not None:
            (name,) = {kind.stays for _, kind, _ in used_kinds(config.model) if kind.stays}
            made.staying = load(name).of(engine, Path(path))
        return made

    def score(self, texts: Sequence[Text]) -> list[Score]:
        """The score of each text. Texts that are equal up to their last token are computed once, and so is a context
        with several endings where the layout permits it (see `reads_on`)."""
        if self.by_decoder:
            return self._score_by_decoder(texts)
        found = torch.zeros(len(texts), 2, dtype=torch.float64)
        groups, others = split(texts) if self.endings is not None else ([], list(range(len(texts))))
        if self.endings is not None:
            before = self.endings.tokens
            answers = self.endings.read(groups, texts)
            self.tokens += self.endings.tokens - before
            for index, (logs, right) in answers.items() if self.reports else ():
                found[index] = torch.tensor([math.fsum(logs), right], dtype=torch.float64)
        for index, logs, best in self._read_whole(texts, others):
            greedy = best == list(texts[index].targets)
            found[index] = torch.tensor([math.fsum(logs), greedy], dtype=torch.float64)
        return [Score(log_likelihood, bool(greedy)) for log_likelihood, greedy in self._sum(found).tolist()]

    def _score_by_decoder(self, texts: Sequence[Text]) -> list[Score]:
        asked = [Request(each.tokens, 0, at, scored=each.scored, likeliest=1) for at, each in enumerate(texts)]
        found = list[Score]()
        for text, drawn in zip(texts, self.answer(asked)):
            begin = len(text.tokens) - text.scored
            best = [drawn.likeliest[place][0][0] for place in range(begin, len(text.tokens))]
            found.append(Score(math.fsum(drawn.scores), best == list(text.targets)))
        return found

    def _read_whole(
        self, texts: Sequence[Text], indices: Sequence[int]
    ) -> Iterator[tuple[int, list[float], list[int]]]:
        """(number, log-probabilities of its scored tokens, likeliest ids in their places) of the texts that this rank
        has read from their beginnings."""
        same: dict[Row, list[int]] = {}
        for index in indices:
            same.setdefault(texts[index].inputs, []).append(index)
        for step in self._steps(sorted(same, key=lambda row: (-len(row), row))):
            asked = [[(at, index) for at, row in enumerate(rows) for index in same.get(row, ())] for rows in step]
            readers = [self._scores([(at, texts[index]) for at, index in each]) for each in asked]
            self.alive()
            for each, (logs_N, best_N) in zip(asked, self._read(step, readers)):
                logs, best, begin = logs_N.double().tolist(), best_N.tolist(), 0
                for _, index in each:
                    end = begin + texts[index].scored
                    yield index, logs[begin:end], best[begin:end]
                    begin = end

    def answer(self, requests: Sequence[Request], vocabulary: int | None = None, *, routes: int = 0) -> list[Drawn]:
        """The continuation of each request, on all ranks. Draws are keyed by the request's number and the position.

        Where the model permits it (`obstacle`), the decoder reads the texts. Replicas, context parallel ranks too,
        share the requests. A pipeline of n ranks has n passes under way. A class of transformers that each rank has
        whole continues texts by its own cache. Of other models the whole text is read for each token.

        Args:
            vocabulary: only ids below it are chosen. The embedding may have more rows than the tokenizer has ids.
            routes: experts of a token in all layers, which are kept. 0 keeps none.

        Raises:
            RequestError: on all ranks, before any has begun, if one can never be answered, or asks for scores where the
                decoder does not read the texts.
        """
        longest = getattr(getattr(self.engine, "model", None), "longest", None)
        for each in requests:
            each.check(self.config.model, vocabulary)
            if longest is not None and each.whole > longest:
                raise RequestError(f"a request has {each.whole} tokens to read, and the model {longest} positions")
            if each.scored and not self.cached:
                raise RequestError("a request must have scored=0 where texts are read again for each token: use score")
        if self.continues:
            return self._answer_by_class(requests, vocabulary)
        if not self.cached:
            return self._answer_whole(requests, vocabulary)
        assert isinstance(self.engine, ReadsOn)
        if self.staying is not None:
            rows = self.texts * self.mesh.replicas.size
            decoder = Decoder(self.staying, self.device, rows=rows, vocabulary=vocabulary, alive=lambda: self.alive())
            together = decoder.run(requests)
            self.tokens += decoder.schedule.read // self.mesh.replicas.size
            return together
        made, ranks, stages = [Drawn() for _ in requests], self.mesh.replicas, self.mesh.pipeline
        own = range(len(requests) * ranks.rank // ranks.size, len(requests) * (ranks.rank + 1) // ranks.size)
        cuts = [own.start + len(own) * place // stages.size for place in range(stages.size + 1)]
        parts = [requests[begin:end] for begin, end in pairwise(cuts)]
        agree = partial(largest_of, ranks, self.device)
        how: dict[str, Any] = {
            "vocabulary": vocabulary,
            "agree": agree,
            "stages": stages,
            "alive": lambda: self.alive(),
            "reading": self.reading,
            "routes": bool(routes),
        }
        rows = -(-self.texts // stages.size)
        decoders = [Decoder(self.engine, self.device, rows=rows, **how) for _ in parts]
        for index, drawn in zip(own, run_together(decoders, parts)):
            made[index] = drawn
        self.tokens += sum(each.schedule.read for each in decoders)
        self._exchange(made, requests)
        if routes:
            self._exchange_routes(made, max(each.whole for each in requests), routes)
        return made

    def _exchange_routes(self, made: list[Drawn], longest: int, width: int) -> None:
        """Send the experts of each rank's tokens to all ranks."""
        found = torch.zeros(len(made), longest, width, dtype=torch.int32)
        for row, each in enumerate(made if self.mesh.at.tensor == 0 else ()):
            for place, experts in each.routes.items():
                found[row, place] = experts.int()
        for each, rows in zip(made, self._sum(found).long()):
            each.routes = dict(enumerate(rows))

    def _exchange(self, made: list[Drawn], requests: Sequence[Request]) -> None:
        """Send each rank's texts to all ranks, with one likeliest token of each place."""
        if self.mesh.layout.world_size == 1:
            return
        tokens, scored, noted = (
            max(map(attrgetter(name), requests), default=0) for name in ("tokens", "scored", "likeliest")
        )
        places = tokens + scored if noted else 0
        begins = (4, 4 + tokens, 4 + 2 * tokens, 4 + 2 * tokens + scored, 4 + 2 * tokens + scored + places)
        found = torch.zeros(len(made), begins[-1] + places, dtype=torch.float64)
        # Context parallel ranks have texts of their own.
        reports = self.mesh.at.tensor == 0 and self.mesh.at.pipeline == self.last
        for row, each in enumerate(made if reports else ()):
            best = [each.likeliest[place][0] for place in sorted(each.likeliest)]
            counts = [len(each.tokens), each.ended, len(each.scores), len(best)]
            found[row, :4] = torch.tensor(counts, dtype=torch.float64)
            numbers: tuple[Sequence[float], ...] = (each.tokens, each.log_p, each.scores, *zip(*best))
            for begin, values in zip(begins, numbers):
                found[row, begin : begin + len(values)] = torch.tensor(values, dtype=torch.float64)
        for each, request, row in zip(made, requests, self._sum(found).tolist()):
            count, each.ended, scores, likely = int(row[0]), bool(row[1]), int(row[2]), int(row[3])
            sizes = (count, count, scores, likely, likely)
            ids, each.log_p, each.scores, best_ids, logs = (row[at : at + size] for at, size in zip(begins, sizes))
            each.tokens, first = [int(token) for token in ids], len(request.prompt) - request.scored
            each.likeliest = {first + at: [(int(token), log)] for at, (token, log) in enumerate(zip(best_ids, logs))}

    @torch.no_grad()
    def _answer_by_class(self, requests: Sequence[Request], vocabulary: int | None) -> list[Drawn]:
        """`answer` by a class of transformers, whose cache continues one text after the other."""
        engine: Any = self.engine
        engine.model.eval()
        engine.state.for_evaluation()
        made, ranks = [Drawn() for _ in requests], self.mesh.replicas
        for index in range(ranks.rank, len(requests), ranks.size):
            request, drawn = requests[index], made[index]
            state, new = engine.model.new_state(), list(request.prompt)
            while len(drawn.tokens) < request.tokens and not drawn.ended:
                tokens_1S = torch.tensor([new], device=self.device)
                read = len(request.prompt) + len(drawn.tokens) - len(new)
                logits_1V = engine.model.decode(tokens_1S, state, read, last=True)[:, -1, :vocabulary]
                new, logs = next_tokens([(request, drawn)], logits_1V)
                drawn.tokens += new
                drawn.log_p += logs
                is_over(request, drawn)
                self.tokens += tokens_1S.numel()
                self.alive()
        self._exchange(made, requests)
        return made

    def _answer_whole(self, requests: Sequence[Request], vocabulary: int | None) -> list[Drawn]:
        """`answer` by reading the whole texts for each token."""
        made = [Drawn() for _ in requests]
        together = self.texts * self.mesh.data.size * self.mesh.pipeline.size
        order = sorted(
            range(len(made)), key=lambda index: (-len(requests[index].prompt), requests[index].prompt, index)
        )
        for begin in range(0, len(order), together):
            active = [index for index in order[begin : begin + together] if requests[index].tokens]
            while active:
                for index, (token, log_p) in zip(active, self._next(active, requests, made, vocabulary)):
                    made[index].tokens.append(int(token))
                    made[index].log_p.append(log_p)
                self.alive()
                active = [index for index in active if not is_over(requests[index], made[index])]
        return made

    def _next(
        self, active: list[int], requests: Sequence[Request], made: Sequence[Drawn], vocabulary: int | None
    ) -> list[list[float]]:
        """The token after each text and its log-probability."""
        places: dict[Row, list[int]] = {}
        for at, index in enumerate(active):
            places.setdefault((*requests[index].prompt, *made[index].tokens), []).append(at)
        found = torch.zeros(len(active), 2, dtype=torch.float64)
        for step in self._steps(sorted(places, key=lambda row: (-len(row), row))):
            real = [[row for row in rows if row] for rows in step]
            for rows, logits_NV in zip(real, self._read(step, [self._last_logits(rows) for rows in real])):
                for row, logits_V in zip(rows, logits_NV):
                    own = [(requests[active[at]], made[active[at]]) for at in places[row]]
                    logits = logits_V[:vocabulary].repeat(len(own), 1)
                    found[places[row]] = torch.tensor(next_tokens(own, logits), dtype=torch.float64).T
        return self._sum(found).tolist()

    def _steps(self, rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
        """This rank's micro-batches of each step. All ranks have the same number of micro-batches and rows, with ()
        as padding."""
        data, micros = self.mesh.data, self.mesh.pipeline.size  # a micro-batch per stage keeps all stages busy
        for begin in range(0, len(rows), self.texts * data.size * micros):
            whole = list(rows[begin : begin + self.texts * data.size * micros])
            micros_here = min(micros, -(-len(whole) // data.size))
            whole += [()] * (-len(whole) % (data.size * micros_here))
            own = whole[data.rank :: data.size]
            yield [own[micro::micros_here] for micro in range(micros_here)]

    def _read(self, step: list[list[Row]], readers: list[Reader]) -> list[Any]:
        """Results of the readers for a step's micro-batches. Empty on ranks that do not report."""
        longest = torch.tensor([max((len(row) for rows in step for row in rows), default=1)], device=self.device)
        if self.mesh.data.size > 1:
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.mesh.data.group)
        length = self._length(int(longest))
        self.tokens += length * sum(map(len, step))
        found = self.engine.read(self._batch(step, length), readers)
        return found if self.reports else []

    def _length(self, longest: int) -> int:
        """The length of a batch, equally divisible by tensor and context parallel ranks.

        A context parallel rank reads the last tokens of the rank before. So no rank may have just a few tokens, or just
        a few of the last chunk of a sequence."""
        ranks = self.mesh.context.size * (self.mesh.tensor.size if self.mesh.layout.sequence else 1)
        unit = math.lcm(LENGTHS, ranks)
        if self.mesh.context.size > 1:
            unit = ranks * LENGTHS
            training = self.config.training
            if training.sequence_chunks > 1:
                unit = math.lcm(unit, training.sequence_length // training.sequence_chunks)
        length = -(-longest // unit) * unit
        most = longest_text(self.config)
        return length if most is None else max(min(length, most), longest)

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
        return scores_at(rows, places, [token for _, text in texts for token in text.targets])

    @staticmethod
    def _last_logits(rows: list[Row]) -> Reader:
        """Logits [rows, V] of the token after the first rows of the batch."""
        return lambda head, x_BSH: head.logits_at(
            states_at(x_BSH, list(range(len(rows))), [len(row) - 1 for row in rows])
        )

    def _sum(self, found: torch.Tensor) -> torch.Tensor:
        """Results of all ranks. Each is known to one of them and zero elsewhere, so nothing is rounded."""
        if self.mesh.layout.world_size == 1:
            return found
        found = found.to(self.device)
        dist.all_reduce(found)
        return found.cpu()


class Leader:
    """Rank 0's side: each call is made on all ranks. `dismiss` ends the other ranks' loops."""

    def __init__(self, scorer: Scorer, communicator: Communicator, tokenizer: Tokenizer) -> None:
        self._scorer, self._communicator, self._tokenizer = scorer, communicator, tokenizer

    def score(self, texts: Sequence[Text]) -> list[Score]:
        self._call("score", [[list(text.tokens), text.scored] for text in texts])
        return self._scorer.score(texts)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling, stops: Sequence[str]
    ) -> list[list[int]]:
        """Up to `tokens` tokens after each prompt. The last one is the end-of-document token or the end of one of
        `stops`."""
        self._call("generate", [[list(prompt) for prompt in prompts], tokens, vars(sampling), list(stops)])
        return _generate(self._scorer, self._tokenizer, prompts, tokens, sampling, stops)

    def dismiss(self) -> None:
        self._call("dismiss", None)

    def _call(self, verb: str, what: Any) -> None:
        self._communicator.broadcast([verb, what])


def follow(scorer: Scorer, communicator: Communicator, tokenizer: Tokenizer) -> None:
    """The loop of the other ranks, until the leader dismisses them."""
    while True:
        verb, what = communicator.broadcast(None)
        if verb == "dismiss":
            return
        if verb == "score":
            scorer.score([Text(tuple(tokens), scored) for tokens, scored in what])
        else:
            prompts, tokens, sampling, stops = what
            _generate(scorer, tokenizer, prompts, tokens, Sampling(**sampling), stops)


def _generate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    stops: Sequence[str],
) -> list[list[int]]:
    how: dict[str, Any] = {"sampling": sampling, "finished": ending(tokenizer, stops), "end": tokenizer.eod_id}
    requests = [Request(tuple(prompt), tokens, number, **how) for number, prompt in enumerate(prompts)]
    return [each.tokens for each in scorer.answer(requests, tokenizer.size)]
