"""What RWKV layers need: whole heads, on each rank the same number of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import Facts
from ..pattern import KINDS
from ..problems import Problem
from .model import divisors, kind_options, near, section_key

MIXERS = tuple(kind for kind in KINDS if kind.startswith("rwkv") and KINDS[kind].role == "mixer")
FFNS = tuple(kind for kind in KINDS if kind.startswith("rwkv") and KINDS[kind].role == "ffn")


def rwkv_heads_are_whole(facts: Facts) -> Iterator[Problem]:
    width = facts.config.model.hidden_size
    for kind in MIXERS:
        for prefix, own in kind_options(facts, kind):
            if width % getattr(own, "head_dim", 1):
                yield facts.problem(
                    section_key(facts, prefix, "head_dim", kind),
                    "model.hidden_size",
                    rule=f"the {width} channels of {kind} are whole heads",
                    fix=f"use head_dim = {near(own.head_dim, divisors(width))}",
                )


def rwkv_divides_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    ranks, width = facts.config.parallel.tensor, facts.config.model.hidden_size
    for kind in MIXERS:
        for prefix, own in kind_options(facts, kind):
            size = getattr(own, "head_dim", 1)
            if width % size == 0 and width // size % ranks:
                key = section_key(facts, prefix, "head_dim", kind) if size > 1 else "model.hidden_size"
                yield facts.problem(
                    key,
                    "parallel.tensor",
                    rule=f"each tensor parallel rank has the same number of the {width // size} "
                    f"{'heads' if size > 1 else 'channels'} of {kind}",
                    fix=f"use parallel.tensor = {near(ranks, divisors(width // size))}",
                )
    for kind in FFNS:
        for prefix, own in kind_options(facts, kind):
            if own.hidden_size is not None and own.hidden_size % ranks:
                yield facts.problem(
                    section_key(facts, prefix, "hidden_size", kind),
                    "parallel.tensor",
                    rule=f"each tensor parallel rank has the same share of the {own.hidden_size} channels of {kind}",
                    fix=f"use parallel.tensor = {near(ranks, divisors(own.hidden_size))}",
                )


RULES = (rwkv_heads_are_whole, rwkv_divides_over_tensor_ranks)
