"""Samples of the model during training."""

from collections.abc import Callable
from typing import Any

from megatron.config import Config
from megatron.config.sections.output import SampleOptions
from megatron.data.tokenizer import build_tokenizer
from megatron.decoding.covered import obstacle
from megatron.decoding.decoder import WholeModel
from megatron.decoding.one_text import continuations
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.engine.engine import PlainEngine
from megatron.engine.protocol import Engine


def sampler(
    config: Config, engine: Engine, log: Callable[[str], object]
) -> Callable[[list[str], SampleOptions, int], list[str]] | None:
    """The generator of the samples hook. None where this layout cannot sample, or no samples are asked for."""
    options = config.evaluation.samples
    if options.every is None or not options.prompts:
        return None
    own: Any = engine
    reading = own
    if (reason := obstacle(config)) is not None:
        shared = config.parallel.context > 1 or config.parallel.sequence
        if not isinstance(engine, PlainEngine) or config.zero.stage == 3 or shared:
            how = "Use generate.py on a checkpoint"
            log(f"no samples during training: no rank reads a whole text, and {reason}. {how}")
            return None
        reading = WholeModel(own.model)
    if config.tokenizer.type == "none":
        log("no samples during training: tokenizer.type is none")
        return None
    tokenizer = build_tokenizer(config.tokenizer)

    def make(prompts: list[str], options: SampleOptions, step: int) -> list[str]:
        own.state.for_evaluation()
        sampling = Sampling(options.temperature, options.top_k, options.top_p, seed=config.training.seed + step)
        ids = [tuple(tokenizer.encode(prompt)) for prompt in prompts]
        requests = [Request(x, options.tokens, n, sampling, end=tokenizer.eod_id) for n, x in enumerate(ids) if x]
        where = {"device": own.device, "axis": own.mesh.replicas, "stages": own.mesh.pipeline}
        made = iter(continuations(reading, requests, vocabulary=tokenizer.size, **where))
        return [tokenizer.decode(next(made)) if each else "" for each in ids]

    return make
