"""Training the runs of a suite: some at a time on this machine, or as an array of jobs in Slurm."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.format.errors import CheckpointError
from megatron.config.problems import UserError
from megatron.config.resolution import Resolved
from megatron.config.show.difference import Described, described, differences
from megatron.installation import root

from .forks import make
from .members import Member, Suite, state_of

TICK = 0.2  # seconds between two polls
HARMLESS = ("launch.", "logging.", "evaluation.", "checkpoint.", "data.cache", "data.workers", "data.prefetch")


def waiting(suite: Suite, resolved: dict[str, Resolved]) -> list[Member]:
    """The members that are not finished.

    Raises:
        UserError: a run of a member's folder was made with other values.
    """
    found = []
    for member in suite.members:
        config = resolved[member.name].config
        made = [member.folder / "config.yml", *(Path(file) for file in member.files if member.fork)]
        if there := next((file for file in made if file.is_file()), None):
            _refuse_another(member, there, resolved[member.name])
        state, end = state_of(member), config.training.stop_at_step or config.training.steps
        if state.word not in ("finished", "stopped") or state.step < end:
            found.append(member)
    return found


def _refuse_another(member: Member, made: Path, resolved: Resolved) -> None:
    now = Described(resolved.config, {key: str(origin) for key, origin in resolved.origins.items()})
    changed = [
        each.key
        for each in differences(described(made, ranks=resolved.ranks), now)
        if not each.key.startswith(HARMLESS) and each.key.partition(".")[0] not in ("parallel", "zero")
    ]
    if changed:
        raise UserError(
            f"{member.folder} has a run that was made with other values of {', '.join(changed[:8])}: undo the change "
            "of the suite, or give it another `dir`"
        )


def command(member: Member, suite: Suite) -> list[str]:
    """The command that trains or continues a member."""
    ranks = ["--ranks", str(suite.ranks)] if suite.ranks else []
    return [sys.executable, str(root() / "deepy.py"), *ranks, str(root() / "train.py"), *member.words]


def train(suite: Suite, members: list[Member], jobs: int, tell: Callable[[str], None]) -> list[str]:
    """Train members, `jobs` at a time, with output in <folder>.out. On Ctrl-C all of them save.

    A branch begins once its trunk has the checkpoint, and fails if the trunk has ended without it.

    Returns:
        Names of members that failed, or were not begun because of Ctrl-C.
    """
    queue, running, failed = list(members), dict[str, tuple[Member, subprocess.Popen]](), list[str]()
    suite.folder.mkdir(parents=True, exist_ok=True)
    try:
        while queue or running:
            for member in list(queue):
                if len(running) == jobs:
                    break
                if (ready := _ready(member, {*running, *(each.name for each in queue)}, tell)) is not None:
                    queue.remove(member)
                    if ready:
                        tell(f"{member.name}: begins")
                        running[member.name] = (member, _start(member, suite))
                    else:
                        failed.append(member.name)
            time.sleep(TICK)
            for name, (member, process) in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[name]
                tell(f"{name}: {'trained' if status == 0 else f'failed with status {status}, see {_output(member)}'}")
                failed += [name] * (status != 0)
    except KeyboardInterrupt:
        for _, process in running.values():
            process.send_signal(signal.SIGINT)
        for _, process in running.values():
            process.wait()
        tell(f"interrupted: {len(running)} runs were stopped, {len(queue)} have not begun")
        failed += [*running, *(member.name for member in queue)]
    return failed


def _ready(member: Member, coming: set[str], tell: Callable[[str], None]) -> bool | None:
    """Whether a member can begin. None for a branch whose trunk may still save the checkpoint."""
    if member.fork is None or member.trunk is None:
        return True
    try:
        if make(member.fork, member.trunk.folder, member.folder):
            return True
    except (CheckpointError, OSError, UserError) as error:
        tell(f"{member.name}: cannot begin: {error}")
        return False
    if member.trunk.name in coming:
        return None
    tell(f"{member.name}: cannot begin: {member.trunk.folder} has no checkpoint of step {member.fork.at}")
    return False


def _output(member: Member) -> Path:
    return member.folder.with_name(f"{member.folder.name}.out")


def _start(member: Member, suite: Suite) -> subprocess.Popen:
    with open(_output(member), "ab") as out:
        # A session of its own, so that only this process receives the terminal's Ctrl-C and forwards it once.
        return subprocess.Popen(
            command(member, suite), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def array_script(suite: Suite, options: list[str], first: int, last: int) -> str:
    """A batch script for sbatch: a task for each member from `first` to `last`, with the resources of `options`."""
    tool = [sys.executable, str(root() / "tools" / "suite.py"), str(suite.path.absolute()), "launch", "--index"]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={suite.name}",
        f"#SBATCH --array={first}-{last}",
        f"#SBATCH --output={suite.folder.absolute()}/slurm-%A_%a.out",
        *(f"#SBATCH {option}" for option in options),
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'exec {shlex.join(tool)} "$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def write_arrays(suite: Suite, options: list[str]) -> list[str]:
    """Write array.sh, and branches.sh for members that can begin after it. Return the lines that submit them."""
    suite.folder.mkdir(parents=True, exist_ok=True)
    trunks, last = sum(member.fork is None for member in suite.members), len(suite.members) - 1
    script, branches = suite.folder / "array.sh", suite.folder / "branches.sh"
    script.write_text(array_script(suite, options, 0, trunks - 1), encoding="utf-8")
    if last < trunks:
        return [f"sbatch {script}"]
    branches.write_text(array_script(suite, options, trunks, last), encoding="utf-8")
    return [f"job=$(sbatch --parsable {script})", f"sbatch --dependency=afterany:$job {branches}"]
