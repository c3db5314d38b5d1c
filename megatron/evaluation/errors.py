"""The error of this folder that a user sees once an evaluation runs."""

from __future__ import annotations


class TaskError(ValueError):
    """A task asks for what this model or its tokenizer cannot do, or its data cannot be had; the text has the fix."""
