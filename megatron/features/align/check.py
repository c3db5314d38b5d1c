"""Mistakes of reinforcement learning that align.py finds before it starts any rank. Without torch."""

from collections.abc import Sequence
from typing import Any

from megatron.config.problems import UserError
from megatron.data.tokenizer import build_tokenizer

from .options import ENVIRONMENTS, align_of, server_key, wanted
from .problems import Problems
from .verifier import Verifier


def before_start(words: Sequence[str], config: Any) -> list[str]:
    """A sentence for each mistake: no prompts, prompts that cannot be read, rewards that cannot be imported."""
    if not wanted(config):
        return ["deepy align needs align.prompts or align.environment. deepy train works without"]
    own, found = align_of(config), list[str]()
    if config.launch.environment_file is None:
        try:
            server_key(own.server.key_variable)
        except UserError as error:
            found.append(str(error))
    verifier = Verifier.of(own)
    others = [] if own.environment is None else [ENVIRONMENTS.get(own.environment, own.environment)]
    if wrong := verifier.fault(others):
        found.append(wrong)
    verifier.close()
    if own.environment is not None:
        return found
    try:
        for held_out in (False, *([True] if own.evaluate is not None else [])):
            Problems(config, build_tokenizer(config.tokenizer), held_out)
    except UserError as error:
        found.append(str(error))
    return found
