"""The command that starts an agent: the same for every job, so that there is nothing to quote and nothing to hide."""

from __future__ import annotations

import sys

from megatron.worker.code_version import root


def agent_command(python: str | None = None) -> list[str]:
    """The argument list. `python` is the interpreter on the host, by default the launcher's own path."""
    return [python or sys.executable, "-u", str(root() / "deepy.py"), "--agent"]
