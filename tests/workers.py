"""Ranks for this suite: the ranks of `megatron.testing`, under the name that the tests use."""

from megatron.testing.ranks import on_ranks as run

__all__ = ["run"]
