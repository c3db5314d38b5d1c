"""The model behind EleutherAI's lm-evaluation-harness (`lm_eval`, 0.4.13).

The rules for contexts and continuations are the harness's own (`TemplateLM`). Long texts are refused, or cut on the
left as by its Hugging Face backend. So a score equals that of `lm_eval --model hf` on the exported model."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from megatron.data.tokenizer import Tokenizer
from megatron.decoding.sampling import GREEDY, Sampling
from megatron.evaluation.scoring import Text

from .scoring import Leader
from .select import TaskError

# Settings of a generation that a task may have, in addition to stops, length and whether to sample.
SAMPLING_WORDS = ("temperature", "top_k", "top_p")
SILENT_WORDS = ("use_cache", "early_stopping", "num_beams")  # equal to the defaults, or without effect here


class HarnessModel(TemplateLM):
    """Answers the harness's requests through a `Leader`, only on rank 0.

    Args:
        max_length: tokens that the model reads at once.
        seed: of generations that sample.
        truncate: whether a context that is too long loses its beginning.

    Raises:
        TaskError: the tokenizer has no end-of-document token, which starts texts without a context.
    """

    def __init__(
        self, leader: Leader, tokenizer: Tokenizer, max_length: int, seed: int = 0, *, truncate: bool = True
    ) -> None:
        super().__init__()
        if tokenizer.eod_id is None:
            raise TaskError("the tokenizer has no end-of-document token: set tokenizer.eod_token or tokenizer.eod_id")
        self._leader, self._tokens, self._seed, self._end = leader, tokenizer, seed, tokenizer.eod_id
        self.max_length, self._truncate = max_length, truncate

    @property
    def eot_token_id(self) -> int:
        return self._end

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.hash  # names the tokenizer in the harness's caches

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Adds nothing at the ends, as in training."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._text(words, context, continuation) for words, context, continuation in requests]
        found = [(score.log_likelihood, score.greedy) for score in self._leader.score(texts)]
        for (words, *_tokens), answer in zip(requests, found):
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return found

    def _text(self, words: tuple[str, str] | None, context: Sequence[int], continuation: Sequence[int]) -> Text:
        self._fits(len(context) + len(continuation) - 1)
        tokens = (*context, *continuation)[-(self.max_length + 1) :]
        try:
            return Text(tuple(tokens), len(continuation))
        except ValueError as error:
            about = "a window of a text" if words is None else f"the continuation {words[1]!r}"
            raise TaskError(f"{about} has {len(continuation)} tokens, the model reads {self.max_length}") from error

    def _fits(self, tokens: int) -> None:
        if tokens > self.max_length and not self._truncate:
            raise TaskError(
                f"a text has {tokens} tokens, and the model reads {self.max_length}. Give fewer examples, a larger "
                "--max-length, or evaluation.truncate=true, which cuts beginnings off as lm_eval does"
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores each token of a text once. Windows follow each other, and the last one has the longest possible
        context."""
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._loglikelihood_tokens([(None, *window) for each in windows for window in each]))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [utils.make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to their first stop, without it."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        answers = [""] * len(requests)
        for indices in groups.values():
            contexts = [requests[index].args[0] for index in indices]
            for index, text in zip(indices, self._texts(contexts, requests[indices[0]].args[1])):
                answers[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return answers

    def _texts(self, contexts: list[str], asked: dict[str, Any]) -> Iterable[str]:
        options = normalize_gen_kwargs(dict(asked), 256)
        end = self._tokens.token(self.eot_token_id)
        stops = handle_stop_sequences(options.pop("until", None), eos=end)
        tokens, sampling = options.pop("max_gen_toks"), self._sampling(options)
        room = self.max_length - tokens
        if room < 1:
            raise TaskError(
                f"the task generates {tokens} tokens and the model reads {self.max_length}, so nothing is left for the "
                "prompt. Give the task a smaller max_gen_toks, or evaluate with a larger --max-length"
            )
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        self._fits(max(map(len, prompts)) + tokens)
        prompts = [prompt[-room:] for prompt in prompts]
        made = self._leader.generate(prompts, tokens, sampling, [stop for stop in stops if stop and stop != end])
        return [postprocess_generated_text(self._tokens.decode(each), stops, None) for each in made]

    def _sampling(self, options: dict[str, Any]) -> Sampling:
        samples = options.pop("do_sample", False)
        chosen = {word: options.pop(word) for word in SAMPLING_WORDS if options.get(word) is not None}
        foreign = [word for word, value in options.items() if word not in SILENT_WORDS and value is not None]
        if foreign or options.get("num_beams", 1) != 1:
            raise TaskError(f"the task asks for {', '.join(foreign) or 'beams'} in a generation, which is unknown here")
        try:
            return Sampling(**chosen, seed=self._seed) if samples else GREEDY
        except (TypeError, ValueError) as error:
            raise TaskError(f"the task asks for a generation by {chosen}: {error}") from error
