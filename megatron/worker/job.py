"""The configuration of a worker, from its arguments and its environment."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.config.problems import UserError
from megatron.config.registry import registry_of
from megatron.config.source.arguments import ArgumentError, split
from megatron.pipes import visible

from .place import LaunchError, WorkerEnvironment, worker_environment

if TYPE_CHECKING:
    from megatron.config import Config

RERUN = 16  # a value must be computed again in another place
CORRUPT = 17  # values that must be equal on several ranks differ
CONFIG_ERROR = 2  # the exit status after a mistake of the user: starting again would not help


def read_job(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None, *, check_inputs: bool = True
) -> tuple[Config, WorkerEnvironment]:
    """The configuration and the place of this worker: all that train.py needs to begin.

    Under deepy.py the configuration is the resolved file that JOB_CONFIG names, checked against JOB_CONFIG_SHA256.
    Otherwise (`python train.py a.yml`, `srun ... python train.py a.yml`, torchrun) it is resolved here, from the
    script's arguments, for the present number of ranks.

    Args:
        argv: the script's arguments. `sys.argv[1:]` if None.
        environment: `os.environ` if None.
        check_inputs: whether the training data must be there (train.py needs them, generate.py does not).

    Raises:
        ConfigError: the configuration has mistakes.
        LaunchError: the environment makes no sense, or the configuration's file is not the one that was sent.
    """
    from megatron.config import config_hash, load, read_resolved, to_yaml  # slow: agents do without

    env = os.environ if environment is None else environment
    place = worker_environment(env)
    given = list(sys.argv[1:] if argv is None else argv)
    if "JOB_CONFIG" in env:
        path, own = Path(env["JOB_CONFIG"]), tuple(given)  # the launcher passes on nothing but the script's own
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != env.get("JOB_CONFIG_SHA256"):
            raise LaunchError(
                f"{path} is not the configuration that was sent: its SHA-256 is {digest}, "
                f"JOB_CONFIG_SHA256 says {env.get('JOB_CONFIG_SHA256')}"
            )
        resolved, text = read_resolved(path, own=True), path.read_text(encoding="utf-8")
    else:
        _answer_without_files(given)
        taken = split(given)
        loaded, own = (load(taken.files, taken.overrides, ranks=place.world_size, check_inputs=check_inputs), taken.own)
        resolved, text = loaded.config, to_yaml(loaded)
    digest = config_hash(resolved)
    return resolved, WorkerEnvironment(**{**vars(place), "config_sha256": digest, "config_text": text, "own": own})


def show_own_help(script: str) -> bool:
    """Print the options of a script. False: it has none."""
    registry, name = registry_of(()), Path(script).stem
    if found := name in registry.names("options"):
        registry.load("options", name)().print_help()
    return found


def _answer_without_files(given: Sequence[str]) -> None:
    """End a script that is asked for help, or for nothing.

    Raises:
        ArgumentError: there are no words.
    """
    name = Path(sys.argv[0]).name
    command = name if name.startswith("deepy ") else f"python {name}"
    usage = f"usage: {command} a.yml b.yml ... key.path=value ...    one process. For more: ./deepy.py --help"
    if not given:
        raise ArgumentError(f"no configuration file: {usage}")
    if given in (["-h"], ["--help"]):
        if not show_own_help(name):
            print("\n\n".join(filter(None, (usage, (sys.modules["__main__"].__doc__ or "").strip()))))
        raise SystemExit(0)


def check_agreement(place: WorkerEnvironment, gather: Callable[[str], Sequence[str]]) -> None:
    """Check that all ranks have the same configuration and the same code. Call it as the first collective.

    Args:
        place: this worker's environment.
        gather: gives every rank's string, in rank order (for example by `torch.distributed.all_gather_object`).

    Raises:
        LaunchError: on every rank, naming the ranks that differ from rank 0.
    """
    said = gather(place.fingerprint)
    other = [rank for rank, each in enumerate(said) if each != said[0]]
    if other:
        raise LaunchError(
            f"ranks {other[:8]}{' ...' if len(other) > 8 else ''} do not run what rank 0 runs: rank 0 has {said[0]}, "
            f"rank {other[0]} has {said[other[0]]}. Bring all hosts to the same commit and the same files"
        )


def guarded(main: Callable[[], Any]) -> int:
    """Run a script's main function: mistakes of the user become a message and status 2, without a traceback.

    So do data files and checkpoints that are missing, damaged or do not fit: starting again would not help. An
    exception may have an exit status of its own, `status`."""
    try:
        return int(main() or 0)
    except (UserError, LaunchError) as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return CONFIG_ERROR
    except Exception as error:
        status = getattr(error, "status", None)
        if not isinstance(status, int):
            raise
        traceback.print_exc()
        return status


def leave_process(status: int) -> NoReturn:
    """As `sys.exit`, but without taking the interpreter apart.

    A thread of gloo may hold the tensors of the last collective for a moment after it has returned, on a busy machine
    until the process ends. If it frees them while the interpreter is being taken apart, it asks for Python's lock, is
    ended for that, and ends the process. This is "terminate called without an active exception", SIGABRT, after a
    complete run. So threads of Python's own are waited for, what was registered for the end is called, and then nothing
    else happens."""
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first: executors, and other threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            status = status or 1
    os._exit(status)
