"""Open a checkpoint of any layout and continue texts, for generate.py. Several processes can share the keys of a
long text."""

import argparse
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.format.fragment import WEIGHT, weight_fragments
from megatron.checkpoint.read.reader import config_of
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import Config
from megatron.config.admitted import add_flag
from megatron.config.problems import UserError
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.decoding.decoder import WholeModel
from megatron.decoding.growing_text import CONTEXT, GrowingText
from megatron.decoding.one_text import complete, continuations, covers, tokens_left
from megatron.decoding.outside import Outside, add_expert_options
from megatron.decoding.read_less import Factory, chosen
from megatron.decoding.reading_options import add_options
from megatron.decoding.sampling import Sampling, ending
from megatron.decoding.schedule import Request
from megatron.model.stack import Model, ModelPlan, make_model
from megatron.parallel.layout.mesh import ALONE, Axis, Mesh
from megatron.parallel.layout.precision import COMPUTE_TYPES
from megatron.pipes import visible
from megatron.worker.place import WorkerEnvironment, worker_environment


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype | None = None, plan: Callable[..., ModelPlan] = ModelPlan
) -> tuple[Model, Config]:
    """The model of a checkpoint, whole, in the run's compute type (or `dtype`).

    Args:
        plan: builds it.
    """
    checkpoint = open_checkpoint(path, verify="sizes")
    config = config_of(checkpoint)
    dtype = dtype or (COMPUTE_TYPES[config.precision.compute] if device.type == "cuda" else torch.float32)
    model = make_model(plan(config, Mesh.single(), device, dtype, False))
    checkpoint.read_into(weight_fragments(model), cast={WEIGHT})
    return model.eval(), config


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    # Ranks of torchrun share a text. Variables of a scheduler, in an interactive session, do not mean that.
    place = worker_environment() if "WORLD_SIZE" in os.environ else WorkerEnvironment()
    try:
        if place.world_size > 1 and options.prompt is None and options.file is None:
            raise UserError("several ranks must have --prompt or --file: only one of them could be asked")
        path = find_checkpoint(options.path)
        device = _device(options.device, place)
        outside = Outside.of(options, device)
        plan: Callable[..., ModelPlan] = ModelPlan
        if outside is not None:
            config = config_of(open_checkpoint(path, verify="sizes"))
            if wrong := outside.obstacle(config, place.world_size):
                raise CheckpointError(path, f"--experts-held cannot be used: {wrong}")
            plan = outside.plan(config)
        model, config = load_model(path, device, plan=plan)
        if model.plan.depth is None and (options.depth, options.tolerance) != (None, None):
            raise UserError(f"{path}: --depth and --tolerance need a recurrent(...) group in model.layers")
        reading = chosen(options, config, device)
        if reading is not None and (options.no_cache or options.tolerance is not None or place.world_size > 1):
            raise UserError("--loki and --sift must come without --no-cache and --tolerance, on one rank")
    except (CheckpointError, UserError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    fetching = outside.install(model) if outside is not None else None
    with _sharing(place, device) as axis:
        _continue(model, config, options, device, path, axis, reading)
    if fetching is not None:
        print(fetching.report(), file=sys.stderr)
    return 0


def _continue(
    model: Model,
    config: Config,
    options: argparse.Namespace,
    device: torch.device,
    path: Path,
    axis: Axis,
    reading: Factory | None,
) -> None:
    tokenizer = build_tokenizer(config.tokenizer)
    if not options.json and not axis.rank:
        print(f"{path}, {device}", file=sys.stderr)
    together = _together(model, tokenizer, options, device, reading) if axis.size == 1 else {}
    for number, prompt in enumerate(_prompts(options)):
        ids = tokenizer.encode(prompt)
        if not ids:
            sys.stderr.write("an empty prompt has nothing to continue\n")
            continue
        if tokens_left(model, len(ids)) < options.tokens:
            sys.stderr.write(
                f"the prompt has {len(ids)} tokens and the model {model.longest} learned "
                "positions: the text ends there\n"
            )
        made: Iterable[int] = (
            together[number]
            if number in together
            else complete(
                model,
                ids,
                options.tokens,
                _sampling(options, number),
                end=None if options.ignore_end else tokenizer.eod_id,
                vocabulary=tokenizer.size,
                device=device,
                cache=not options.no_cache,
                depth=options.depth,
                tolerance=options.tolerance,
                axis=axis,
                reading=reading,
            )
        )
        text = pieces(made, tokenizer, options.stop, ids[-CONTEXT:])
        if axis.rank:
            deque(text, maxlen=0)
        elif options.json:
            print(visible(json.dumps({"prompt": prompt, "text": "".join(text)}, ensure_ascii=False)))
        else:
            for piece in chain([prompt], text):  # as it grows
                print(visible(piece), end="", flush=True)
            print()


def _sampling(options: argparse.Namespace, number: int) -> Sampling:
    return Sampling(options.temperature, options.top_k, options.top_p, options.seed + number)


def _together(
    model: Model, tokenizer: Tokenizer, options: argparse.Namespace, device: torch.device, reading: Factory | None
) -> dict[int, list[int]]:
    """The continuations of several prompts by their numbers. Empty where each is continued by itself."""
    by_itself = options.no_cache or options.depth is not None or options.tolerance is not None
    if (options.prompt is None and options.file is None) or by_itself or not covers(model):
        return {}
    end = None if options.ignore_end else tokenizer.eod_id

    def finished(ids: Sequence[int]) -> Callable[[list[int]], bool] | None:
        return ending(tokenizer, options.stop, after=ids[-CONTEXT:])

    requests = {
        number: Request(ids, options.tokens, 0, _sampling(options, number), finished(ids), end)
        for number, ids in enumerate(tuple(tokenizer.encode(each)) for each in _prompts(options))
        if ids
    }
    if len(requests) < 2:
        return {}
    own, size = WholeModel(model), tokenizer.size
    made = continuations(own, list(requests.values()), vocabulary=size, device=device, reading=reading)
    return dict(zip(requests, made))


def _device(asked: str | None, place: WorkerEnvironment) -> torch.device:
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", place.local_rank) if device.type == "cuda" and place.world_size > 1 else device


@contextmanager
def _sharing(place: WorkerEnvironment, device: torch.device) -> Iterator[Axis]:
    """The ranks that were started together (`torchrun --nproc-per-node 4 generate.py ...`), which share keys."""
    if place.world_size == 1:
        yield ALONE
        return
    os.environ.update(place.variables)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=place.rank, world_size=place.world_size)
    try:
        yield Axis(place.rank, place.world_size, dist.group.WORLD, tuple(range(place.world_size)))
    finally:
        dist.destroy_process_group()


def pieces(
    made: Iterable[int], tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()
) -> Iterator[str]:
    """The text of tokens as it grows (`GrowingText`), up to the first complete stop string, which is excluded."""
    text = GrowingText(tokenizer, stops, after=after)
    for token in made:
        if piece := text.add(token):
            yield piece
        if text.stopped:
            return
    yield text.rest()


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    if options.prompt is not None:
        yield from options.prompt
    elif options.file is not None:
        yield from options.file.read_text(encoding="utf-8").splitlines()
    else:
        while True:
            try:
                yield input("prompt> ")
            except EOFError:
                print()
                return


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = "Continue texts with a model of any run or checkpoint."
    parser = argparse.ArgumentParser(prog="deepy generate", description=about)
    add = parser.add_argument
    add("path", type=Path, help="a run's directory, a folder of checkpoints, or a checkpoint")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="a text to continue, may be repeated (default: ask)")
    source.add_argument("--file", type=Path, help="a file with one prompt per line")
    add("--tokens", type=int, default=128, help="length of the continuation (default 128)")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    add("--top-k", type=int, default=0, help="choose among the k likeliest tokens (default: all)")
    add("--top-p", type=float, default=1.0, help="choose among the likeliest tokens of this probability together")
    add("--seed", type=int, default=0, help="same seed, same text (default 0)")
    add("--device", help="cpu or cuda (default: a GPU if there is one)")
    add("--no-cache", action="store_true", help="compute without the key/value cache (slower, same text)")
    add("--depth", type=int, help="passes through a recurrent core (default: as in evaluation)")
    fewer = "fewer passes where one changes the newest token's state by at most this share, such as 0.03"
    add("--tolerance", type=float, metavar="SHARE", help=fewer)
    add("--ignore-end", action="store_true", help="continue after the end-of-document token")
    stop = "end before this text, may be repeated (default: none)"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add_expert_options(add)
    add("--json", action="store_true", help="one JSON object per prompt on standard output")
    add_options(parser)
    add_flag(parser)
    options = parser.parse_args(arguments)
    for name, sound, rule in (
        ("tokens", options.tokens >= 1, "at least 1"),
        ("temperature", 0 <= options.temperature < math.inf, "at least 0, and finite"),
        ("top-k", options.top_k >= 0, "at least 0 (0 is all)"),
        ("top-p", 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("depth", options.depth is None or options.depth >= 1, "at least 1"),
        ("tolerance", options.tolerance is None or options.tolerance >= 0, "at least 0"),
        ("stop", all(options.stop), "a text of at least one character"),
    ):
        if not sound:
            parser.error(f"--{name} must be {rule}")
    return options
