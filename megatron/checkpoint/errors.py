"""What goes wrong with checkpoints: one exception that carries every problem found, not only the first."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(Exception):
    """A checkpoint cannot be written, trusted or used.

    Attributes:
        subject: the checkpoint or directory it is about.
        problems: every problem found, one sentence each.
    """

    def __init__(self, subject: object, problems: Iterable[str] | str) -> None:
        self.subject = str(subject)
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.subject, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.subject}: {self.problems[0]}"
        return "\n  - ".join([f"{self.subject}: {len(self.problems)} problems", *self.problems])
