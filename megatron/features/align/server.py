"""Rollouts by an OpenAI-compatible server (vLLM, SGLang) in an environment of its own.

Before texts are drawn, the present weights are written as a Hugging Face folder that the server sees too, and the
server is asked to read it. Requests have ids and get ids and their log-probabilities: no text is tokenized again. Only
rank 0 talks to the server, and nothing of an answer is believed before it is checked."""

import http.client
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint import MASTER, WEIGHT, CheckpointError, Fragment, Meta, open_checkpoint
from megatron.checkpoint.format.communicator import from_rank_0
from megatron.checkpoint.hf.export import export
from megatron.checkpoint.save.writer import save
from megatron.config.file_access import parse_json
from megatron.config.problems import UserError
from megatron.data.hashing import key_of
from megatron.training.world import World

from .options import ServerSection, server_key
from .sampler import Drawn, Rule

LONGEST = 64 << 20  # bytes of an answer
MOST = 256  # requests at a time
MARK = ".of_run"  # in the folder of weights: the run's directory
CHECKPOINT, WEIGHTS = "checkpoint", "step-"
# How servers are asked to read weights: path, and body of a folder.
RELOAD: dict[str, list[tuple[str, Callable[[str], dict[str, Any]]]]] = {
    "sglang": [("/update_weights_from_disk", lambda folder: {"model_path": folder})],
    "vllm": [
        ("/collective_rpc", lambda folder: {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/reset_prefix_cache", lambda folder: {}),
    ],
}
Contents = Callable[[int], tuple[Iterable[Fragment], Meta]]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """Draws as a `Sampler` does. All ranks call its methods together.

    Args:
        run: the run's directory.
        contents: (completed steps) -> the state that a checkpoint has.
        together: requests at a time.
        ends: text and id that end a completion, if any.
    """

    def __init__(
        self,
        section: ServerSection,
        run: Path,
        world: World,
        contents: Contents | None,
        together: int,
        ends: tuple[str | None, int | None],
    ) -> None:
        self.section, self.world, self.contents, self.together, self.ends = section, world, contents, together, ends
        self.run, self.folder = run, Path(section.weights) if section.weights else run / "weights"
        self.loaded: int | None = None
        # No proxy of the environment, and no other address: a redirect is an error.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def draw(
        self,
        step: int,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        rule: Rule,
        alive: Callable[[], None] = lambda: None,
    ) -> list[Drawn]:
        """The continuation of each prompt by the weights after `step` steps. `numbers` key the seeds.

        Raises:
            UserError: on all ranks, if the server cannot be reached, or answers with something else.
        """
        if self.loaded != step:
            self.hand_over(step)
        found = list[dict[str, Any]]()

        def ask() -> None:
            found.extend(asdict(each) for each in self.answers(prompts, numbers, rule, alive))

        self.by_rank_0(ask)
        return [Drawn(**each) for each in self.world.communicator.broadcast(found)]

    def answers(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], rule: Rule, alive: Callable[[], None]
    ) -> Iterator[Drawn]:
        """One request per text: servers apply a request's seed to each of its prompts, so texts of one prompt would be
        equal."""
        bodies = [self.request(prompt, number, rule) for prompt, number in zip(prompts, numbers)]
        pool = ThreadPoolExecutor(min(self.together, MOST), thread_name_prefix="server")
        try:
            for prompt, answer in zip(prompts, pool.map(partial(self.ask, "/v1/completions"), bodies)):
                try:
                    drawn = read_answer(answer, prompt, rule)
                except UserError as error:
                    raise UserError(hidden(str(error), server_key(self.section.key_variable))) from None
                yield drawn
                alive()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def by_rank_0(self, work: Callable[[], None]) -> None:
        """Have rank 0 do something. If it fails, all ranks raise UserError."""
        errors = (CheckpointError, OSError, UserError, ValueError)
        _, failure = from_rank_0(self.world.communicator, work, *errors)
        if failure is not None:
            raise UserError(f"align.server: {self.section.url}: {failure}")

    def request(self, prompt: Sequence[int], number: int, rule: Rule) -> dict[str, Any]:
        stop, end = self.ends
        return {
            "model": self.section.model,
            "prompt": [list(prompt)],
            "max_tokens": rule.tokens,
            "temperature": rule.sampling.temperature,
            "top_p": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "seed": key_of(rule.sampling.seed, rule.sampling.purpose, number) % (1 << 31),
            **({} if stop is None else {"stop": [stop]}),
            **({} if end is None else {"stop_token_ids": [end]}),
        }

    def hand_over(self, step: int) -> None:
        """Write the weights, and have the server read them."""
        if self.contents is None:
            raise UserError(
                "align.server must have a run that can save checkpoints: its weights are sent in their form"
            )
        fragments, meta = self.contents(step)
        self.by_rank_0(self.clear)
        whole = [each for each in fragments if each.state in (WEIGHT, MASTER)]
        path = save(self.folder / CHECKPOINT, step, whole, meta, self.world.communicator)

        def load() -> None:
            target = self.folder / f"{WEIGHTS}{step}"
            export(open_checkpoint(path), target)
            shutil.rmtree(path.parent)
            for place, body in RELOAD[self.section.type]:
                self.ask(place, body(str(target.absolute())), empty=True)

        self.by_rank_0(load)
        self.loaded = step

    def clear(self) -> None:
        """Remove the weights of earlier steps. The folder may be any of the user's, so it is marked as this run's.

        Raises:
            UserError: it has files, and is not marked.
        """
        mark, own = self.folder / MARK, str(self.run.absolute())
        self.folder.mkdir(parents=True, exist_ok=True)
        if not mark.is_file() and any(self.folder.iterdir()):
            raise UserError(f"align.server.weights: {self.folder} must be empty. Give a folder of its own")
        if mark.is_file() and (other := mark.read_text("utf-8", "replace")) != own:
            raise UserError(
                f"align.server.weights: {self.folder} has weights of the run {other[:500]!r}. Give another folder, or "
                "delete it"
            )
        mark.write_text(own, "utf-8")
        for each in (self.folder / CHECKPOINT, *self.folder.glob(f"{WEIGHTS}*")):
            shutil.rmtree(each, ignore_errors=True)

    def ask(self, place: str, body: dict[str, Any], empty: bool = False) -> Any:
        """The JSON that the server answers.

        Raises:
            UserError, ValueError: it answers with another status, too much, or no JSON.
        """
        key = server_key(self.section.key_variable)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        request = urllib.request.Request(
            f"{str(self.section.url).rstrip('/')}{place}", json.dumps(body).encode(), headers
        )
        try:
            with self.opener.open(request, timeout=self.section.timeout) as answer:
                content = answer.read(LONGEST + 1)
        except urllib.error.HTTPError as error:
            said = error.read(500 + len(key or ""))  # a key that begins within 500 bytes is whole
            if key is not None:
                said = said.replace(key.encode(), b"***")
            raise UserError(f"{place} has answered with status {error.code}: {said[:500]!r}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{place} cannot be asked: {error}") from error
        if len(content) > LONGEST:
            raise UserError(f"{place} has answered with more than {LONGEST >> 20} MiB")
        if empty and not content.strip():
            return None
        found = parse_json(content.decode("utf-8"))
        if isinstance(found, dict) and found.get("success") is False:
            raise UserError(f"{place} has failed: {hidden(str(found), key)[:500]}")
        return found


def hidden(text: str, key: str | None) -> str:
    """A server's message, which may repeat the key."""
    return text if key is None else text.replace(key, "***")


def read_answer(answer: Any, prompt: Sequence[int], rule: Rule) -> Drawn:
    """The continuation in an answer to `/v1/completions`, cut where `rule` says that it has ended.

    Raises:
        UserError: it is no answer to this prompt.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1:
        raise UserError(f"an answer must have one choice: {str(answer)[:300]}")
    try:
        ids, logs = choices[0]["token_ids"], choices[0]["logprobs"]["token_logprobs"]
    except (KeyError, TypeError) as error:
        rule_text = "a choice must have token_ids and logprobs.token_logprobs"
        raise UserError(f"{rule_text}: use a server that reads return_token_ids, such as vLLM") from error
    if choices[0].get("prompt_token_ids") not in (None, list(prompt)):
        raise UserError("a choice must repeat the ids of its prompt")
    return _read(ids, logs, rule)


def _read(ids: Any, logs: Any, rule: Rule) -> Drawn:
    most = rule.vocabulary
    if not isinstance(ids, list) or not isinstance(logs, list) or not 0 < len(ids) == len(logs) <= rule.tokens:
        raise UserError(f"a choice must have 1 to {rule.tokens} ids, and a log-probability for each")
    if wrong := [each for each in ids if type(each) is not int or each < 0 or (most is not None and each >= most)]:
        raise UserError(f"a choice must have ids below the tokenizer's {most}, not {str(wrong[0])[:50]}")
    for each in logs:
        if type(each) not in (int, float) or not -1e9 <= each <= 1e-3:
            raise UserError(f"a choice must have finite log-probabilities of at most 0, not {str(each)[:50]}")
    ends = next((count for count in range(1, len(ids) + 1) if rule.finished(ids[:count])), None)
    if ends is None and len(ids) < rule.tokens:
        raise UserError(f"a choice ends after {len(ids)} tokens with {ids[-1]}, which is no end of the run's tokenizer")
    count = len(ids) if ends is None else ends
    return Drawn(ids[:count], [min(0.0, float(each)) for each in logs[:count]], ends is not None)
