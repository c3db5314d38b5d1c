"""Kinds of a user's package where ranks share sequences, or layers work on chunks of them."""

from __future__ import annotations

from tests.config.broken.case import Case, case


def of_kind(name: str, broken: str, layers: str, rest: str, *says: str) -> Case:
    """A configuration with layers of `tests/config/broken/extension.py`."""
    model = f"model: {{extensions: [tests.config.broken.extension], layers: {layers}/mlp x4}}"
    return case(name, f"{model}\n{rest}", broken, *says)


SEQUENCES = [
    of_kind(
        "layers that need all tokens of a sequence that ranks share",
        "a.yml:3: parallel.context = 2",
        "whole",
        "parallel: {context: 2}",
        "model.layers = 'whole/mlp x4' (a.yml:2)",
        "must be 1 with whole layers, which need all tokens of a sequence on one rank",
        "use parallel.context=1",
    ),
    of_kind(
        "states that wait for each other in ZeRO 3",
        "a.yml:4: zero.stage = 3",
        "relayed",
        "parallel: {context: 2}\nzero: {stage: 3}",
        "must be below 3 where ranks share sequences in relayed layers: these run on one rank after the other",
        "use zero.stage=2, or parallel.context=1",
    ),
    of_kind(
        "states that wait while rows pass",
        "a.yml:3: parallel.folded = 2",
        "relayed",
        "parallel: {folded: 2}",
        "must be 1 with relayed layers: these run on one rank after the other",
        "use parallel.context",
    ),
    of_kind(
        "states that wait while matrices are gathered",
        "a.yml:3: parallel.depth = 2",
        "relayed",
        "parallel: {depth: 2, context: 2}",
        "must be 1 where ranks share sequences in relayed layers: these run on one rank after the other",
        "use parallel.depth=1, or parallel.context=1",
    ),
    of_kind(
        "states of chunks that ranks share",
        "a.yml:4: training.sequence_chunks = 2",
        "relayed",
        "parallel: {context: 2}\ntraining: {sequence_chunks: 2}",
        "must be 1 with relayed layers where ranks share sequences",
        "use one of both",
    ),
    of_kind(
        "states of a zigzag cut",
        "a.yml:3: parallel.context_cut = 'zigzag'",
        "relayed",
        "parallel: {context: 2, context_cut: zigzag}",
        "must be contiguous with relayed layers, which continue from the token before",
        "remove context_cut",
    ),
    of_kind(
        "chunks of layers that need all tokens",
        "a.yml:3: training.sequence_chunks = 2",
        "whole",
        "training: {sequence_chunks: 2}",
        "must be 1 with whole layers, which need all tokens at once",
        "remove sequence_chunks",
    ),
]
