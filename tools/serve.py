#!/usr/bin/env python3
"""Answer OpenAI-compatible requests with a model of any run or checkpoint.

    deepy serve runs/my
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "seed": 1}'

Paths: /v1/completions, /v1/chat/completions, /v1/models and /health. The last line of standard output is the address.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.admitted import add_flag  # noqa: E402
from megatron.config.problems import UserError  # noqa: E402
from megatron.decoding.endpoint.limits import of_this_machine  # noqa: E402
from megatron.decoding.reading_options import add_options  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data.chat.encode import ChatTemplate
    from megatron.data.tokenizer import Tokenizer
    from megatron.model.stack import Model


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", help="a run's directory or its configuration, a folder of checkpoints, or a checkpoint")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="0 is a free one (default: %(default)s)")
    add("--key", type=Path, metavar="FILE", help="a file with the key that clients must send as bearer token")
    add("--name", action="append", help="name of the model in requests, may be repeated (default: the run's folder)")
    template = "chat template: chatml, llama3, plain, or a .jinja file (default: the tokenizer's own)"
    add("--template", metavar="NAME", help=template)
    add("--device", help="cpu or cuda (default: a GPU if there is one)")
    longest = "tokens of a prompt and its continuation (default: the run's sequence length)"
    add("--longest", type=int, metavar="TOKENS", help=longest)
    add("--rows", type=int, default=32, help="texts that grow at once (default: %(default)s)")
    add("--pages", type=int, help="of 32 tokens, for all texts (default: enough for the rows)")
    add("--queue", type=int, default=512, help="unfinished texts of all requests (default: %(default)s)")
    add("--seconds", type=float, default=600.0, help="longest time of an answer (default: %(default)g)")
    weights = "let clients replace the weights by a Hugging Face folder inside of this one (default: they cannot)"
    add("--weights", type=Path, metavar="FOLDER", help=weights)
    add_options(parser)
    add_flag(parser)
    return parser


def check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with a message where an option is outside of its range."""
    for name, sound, rule in (
        ("port", 0 <= given.port < 1 << 16, "a port from 0 to 65535"),
        ("longest", given.longest is None or given.longest >= 2, "at least 2"),
        ("rows", given.rows >= 1, "at least 1"),
        ("pages", given.pages is None or given.pages >= 1, "at least 1"),
        ("queue", given.queue >= 1, "at least 1"),
        ("seconds", given.seconds > 0, "above 0"),
        ("weights", given.weights is None or given.weights.is_dir(), "a folder"),
        ("key", given.key is not None or of_this_machine(given.host), "given with an address that others can reach"),
    ):
        if not sound:
            parser.error(f"--{name} must be {rule}")


def template_of(config: Config, tokenizer: Tokenizer, name: str | None) -> ChatTemplate | None:
    """The template of conversations. None where the tokenizer has none, and none is named."""
    from megatron.data.chat.encode import find_template
    from megatron.data.errors import DataError

    try:
        found = find_template(config.tokenizer.path or ".", name, {})
    except DataError:
        if name is not None:
            raise
        return None
    if tokenizer.eod_id is None:
        return found
    return replace(found, values={"eos_token": tokenizer.token(tokenizer.eod_id), **found.values})


def source(path: str) -> Path:
    """The checkpoint of a run, whose configuration may be given in its place."""
    from megatron.checkpoint.save.store import find_checkpoint
    from megatron.data.provenance import run_config

    given = Path(path)
    return find_checkpoint(Path(run_config(given).run.dir) if given.is_file() else given)


def loader(folder: Path, config: Config, longest: int, device: torch.device) -> Any:
    """A function that loads an exported model with the same vocabulary, for texts of `longest` tokens, from a folder
    inside of `folder`."""
    from megatron.checkpoint import CheckpointError
    from megatron.checkpoint.hf.importer import import_model, locate
    from megatron.config import ConfigError
    from megatron.decoding.covered import obstacle
    from megatron.decoding.decoder import WholeModel
    from megatron.decoding.endpoint.limits import Refusal
    from megatron.training.text import load_model

    def load(name: str) -> WholeModel:
        try:
            real, limit = os.path.realpath(name), os.path.realpath(folder)
        except ValueError as error:  # no name of a file
            raise Refusal(400, "model_path must be a folder's name", "model_path") from error
        if os.path.commonpath([real, limit]) != limit or not os.path.isdir(real):
            raise Refusal(403, f"model_path must be a folder inside of {limit}", "model_path")
        try:
            with tempfile.TemporaryDirectory() as draft:
                import_model(locate(real), Path(draft, "imported"))
                model, found = load_model(Path(draft, "imported"), device)
        except (CheckpointError, ConfigError, OSError, ValueError) as error:
            raise Refusal(400, f"the weights cannot be read: {error}", "model_path") from error
        if found.model.vocab_size != config.model.vocab_size:
            rule = f"the weights have {found.model.vocab_size} ids, and must have {config.model.vocab_size}"
            raise Refusal(400, rule, "model_path")
        if (reason := obstacle(found)) is not None:
            raise Refusal(400, f"the decoder cannot read these weights: {reason}", "model_path")
        if (model.longest or math.inf) < longest:
            rule = f"the weights have {model.longest} positions, and must have the endpoint's {longest}"
            raise Refusal(400, rule, "model_path")
        return WholeModel(model)

    return load


async def answer(given: argparse.Namespace, model: Model, config: Config, path: Path, device: torch.device) -> None:
    """Serve until the process is asked to end."""
    from megatron.data.tokenizer import build_tokenizer
    from megatron.decoding.decoder import Decoder, WholeModel
    from megatron.decoding.endpoint.app import Endpoint, listening
    from megatron.decoding.endpoint.limits import Limits
    from megatron.decoding.endpoint.question import Reader
    from megatron.decoding.endpoint.service import Service
    from megatron.decoding.read_less import chosen
    from megatron.decoding.schedule import pages_of

    tokenizer = build_tokenizer(config.tokenizer)
    limits = Limits(given.longest or config.training.sequence_length, given.queue, seconds=given.seconds)
    pages = given.pages or given.rows * pages_of(limits.longest)
    if pages < pages_of(limits.longest):
        raise UserError(f"--pages must be at least {pages_of(limits.longest)}, for one text of {limits.longest} tokens")
    names = given.name or [Path(config.run.dir).name or "deepy"]
    reader = Reader(config.model, tokenizer, names, template_of(config, tokenizer, given.template), limits)
    key = None if given.key is None else given.key.read_text("utf-8").strip()
    if key == "":
        raise UserError(f"--key: {given.key} must have a key")
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ended.set)
    how: dict[str, Any] = {"rows": given.rows, "vocabulary": tokenizer.size, "pages": pages}
    decoder = Decoder(WholeModel(model), device, reading=chosen(given, config, device), **how)
    service = Service(decoder, loop.call_soon_threadsafe)
    reload = None if given.weights is None else loader(given.weights, config, limits.longest, device)
    try:
        async with listening(
            Endpoint(service, reader, tokenizer, limits, key=key, reload=reload), given.host, given.port
        ) as port:
            print(f"{path}, {device}, {names[0]}", file=sys.stderr)
            host = f"[{given.host}]" if ":" in given.host else given.host
            print(f"http://{host}:{port}", flush=True)
            await ended.wait()
    finally:
        service.close()


def main(arguments: list[str] | None = None) -> int:
    parser = options()
    given = parser.parse_args(arguments)
    check(given, parser)
    import aiohttp  # noqa: F401  # before the model is loaded
    import torch

    from megatron.checkpoint import CheckpointError
    from megatron.config import ConfigError
    from megatron.decoding.covered import obstacle
    from megatron.training.text import load_model

    try:
        path = source(given.path)
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, config = load_model(path, device)
        if (reason := obstacle(config)) is not None:
            raise UserError(f"{path}: the decoder cannot read this model: {reason}")
        asyncio.run(answer(given, model, config, path, device))
    except (CheckpointError, ConfigError, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
