"""Kinds of layers of a user's package that share sequences in ways that no kind inside does. They are never built."""

from __future__ import annotations

from megatron.config.kind import LayerKind
from megatron.config.section import Section


class NoOptions(Section):
    """None."""


NOWHERE = "tests.config.broken.extension:Nothing"

RELAYED = LayerKind(
    role="mixer", options=NoOptions, about="A mixer that hands on states.", layer=NOWHERE, context="states"
)
WHOLE = LayerKind(role="mixer", options=NoOptions, about="A mixer that needs all tokens.", layer=NOWHERE)

EXTENSION = {"kind": {"relayed": f"{__name__}:RELAYED", "whole": f"{__name__}:WHOLE"}}
