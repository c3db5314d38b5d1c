"""A broken configuration, and what must be said about it."""

from __future__ import annotations

from dataclasses import dataclass

BASE = """\
model:
  layers: (attention/mlp) x4
  hidden_size: 64
  vocab_size: 128
  attention: {heads: 4}
training:
  steps: 100
  sequence_length: 32
  micro_batch_size: 2
  global_batch_size: 16
data: {synthetic: copy}
"""


@dataclass(frozen=True)
class Case:
    """One broken configuration.

    Attributes:
        name: what is wrong.
        text: a.yml after its first line. Its first line is line 2.
        says: fragments of the message.
        problems: how many problems are listed.
        ranks: of the run.
        arguments: overrides.
    """

    name: str
    text: str
    says: tuple[str, ...]
    problems: int = 1
    ranks: int = 2
    arguments: tuple[str, ...] = ()


def case(name: str, text: str, *says: str, **more) -> Case:
    return Case(name, text, says, **more)
