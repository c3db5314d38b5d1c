"""The command that starts an agent: the same for every job, so that there is nothing to quote and nothing to hide."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron.worker.code_version import root

from ..job.container import inside
from ..wire.specification import Specification

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection


def agent_command(job: Specification, launch: LaunchSection, *options: str) -> list[str]:
    """The argument list. The interpreter is `launch.python` on the host, by default the launcher's own path."""
    agent = [launch.python or sys.executable, "-u", str(root() / "deepy.py"), "--agent", *options]
    return inside(agent, job.directory, launch)
