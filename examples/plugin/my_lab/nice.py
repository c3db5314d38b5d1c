"""A runner for a machine that others use, too: ranks on this machine that give way to whatever else runs there."""

from __future__ import annotations

from megatron.config.sections.layout import LaunchSection
from megatron.launch.runner import Runner, agent_command
from megatron.launch.wire.protocol import Command
from megatron.launch.wire.specification import Specification


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    """One agent, whose children are the ranks. All of them have the lowest priority."""
    return [Command(("nice", "-n", "19", *agent_command(job, launch)), (0,), index=0)]


RUNNER = Runner(commands, program="nice", here=True)
