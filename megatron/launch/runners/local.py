"""This machine, without a network: one agent as a child of the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.connection import Command
from ..wire.specification import Specification
from .agent_command import agent_command

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    return [Command(tuple(agent_command(job, launch)), (0,), index=0)]


RUNNER = Runner(commands, here=True)
