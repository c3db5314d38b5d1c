"""deepy.py: from a command line to a run, and back to an exit status.

Everything that can be wrong with the configuration is found here, before any process starts."""

from __future__ import annotations

import argparse
import heapq
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.file_access import open_plain
from megatron.config.problems import ConfigError, UserError, counted, list_problems
from megatron.config.source.arguments import ArgumentError
from megatron.pipes import visible
from megatron.worker import devices
from megatron.worker.place import LaunchError, worker_environment

from .options import ACTIONS, INQUIRIES, KEYS, REHEARSAL, USAGE, meant, parser
from .report import forwarding
from .wire.specification import Host

if TYPE_CHECKING:
    from .job.job_plan import JobPlan


def main(argv: list[str], script: str | None = None) -> int:
    """The whole launcher. Returns its exit status. An agent loads no configuration, whose import takes longer.

    Args:
        argv: options, script, and the script's arguments.
        script: the script, where `argv` does not name one: the launcher's options may then stand anywhere.
    """
    if argv[:1] == ["--agent"]:
        from .agent.agent import main as serve

        return serve(argv[1:])
    from megatron.worker.job import CONFIG_ERROR, show_own_help

    from .job.hosts import HostError

    if script and argv in (["-h"], ["--help"]):
        parser(script).print_help()
        print()
        show_own_help(script)
        return 0
    options = parser(script).parse_args(_options_first(argv) if script else argv)  # a wrong option ends with status 2
    try:
        _refuse_unread(options)
        if script:
            options.words = [script, *options.words]
        return _serve(options)
    except ConfigError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
    except (ArgumentError, HostError, LaunchError, UserError) as error:
        sys.stderr.write("".join(f"deepy: {visible(line)}\n" for line in str(error).splitlines()))
    return CONFIG_ERROR


def _options_first(argv: list[str]) -> list[str]:
    """The same words, the launcher's options before all others. Words after a bare `--` are the script's own."""
    known = dict(parser()._option_string_actions)
    if "--rehearse" not in argv:  # then these are the script's own
        for name in REHEARSAL:
            del known[name]
    end = argv.index("--") if "--" in argv else len(argv)
    first: list[str] = []
    rest: list[str] = []
    index = 0
    while index < end:
        name, equals, _ = argv[index].partition("=")
        takes = name in known and known[name].nargs is None and not equals
        own = argv[index : index + 1 + takes]
        (first if name in known else rest).extend(own)
        index += len(own)
    return [*first, *rest, *argv[end:]]


def _refuse_unread(options: argparse.Namespace) -> None:
    """Options that would be ignored.

    Raises:
        ArgumentError: there are some.
    """
    values = {**vars(options), "print": options.template}
    given = {f"--{name}".replace("_", "-") for name, value in values.items() if value not in (None, False)}
    asked = [name for name in ACTIONS if name in given]
    if len(asked) > 1:
        raise ArgumentError(f"{' and '.join(asked)} exclude each other: give one")
    if options.submit and not options.sbatch:
        raise ArgumentError("--submit needs --sbatch, which writes the script that it submits")
    unread = [name for name in REHEARSAL if name in given]
    if unread and not options.rehearse:
        raise ArgumentError(
            f"{', '.join(unread)} must come with --rehearse{meant(unread[0])}. Options of a script stand behind its "
            "configuration files"
        )
    if asked and asked[0] in INQUIRIES and options.words:
        raise ArgumentError(f"{asked[0]} names a run, and reads nothing else: remove {' '.join(options.words)}")


def of_features(run: Path) -> str:
    """Lines of the status of a run that its features add."""
    from megatron.config.features.feature import wanted_features
    from megatron.config.registry import load
    from megatron.config.source.resolved_file import read_resolved

    try:
        config = read_resolved(run / "config.yml")
    except ConfigError:  # of a run that has just begun, or whose modules only its user may import
        return ""
    found = (load(each.status)(config, run) for each in wanted_features(config).values() if each.status)
    return "".join(f"{line}\n" for lines in found for line in lines)


def _serve(options: argparse.Namespace) -> int:
    from megatron.worker.job import show_own_help

    if options.logs:
        for line in merged(Path(options.logs)):
            sys.stdout.write(visible(line))
        return 0
    for question in ("status", "stacks"):
        if run := getattr(options, question):
            from .watch.watch import ask

            text = ask(Path(run), question)
            sys.stdout.write(visible(text + (of_features(Path(run)) if question == "status" else "")))
            return 0
    if not options.words:
        raise ArgumentError(f"no script given, usage: {USAGE}")
    from .neox_style import translated

    if options.words[1:] in (["-h"], ["--help"]) and show_own_help(options.words[0]):
        return 0
    folder = ["-d", options.conf_dir] if options.conf_dir else []
    options.words = translated([options.words[0], *folder, *options.words[1:]])
    if options.rehearse:
        return _rehearse(options)
    if not (options.template or options.sbatch or options.dry_run):
        _become_a_rank(options)
    from .job.job_plan import make_plan

    plan = make_plan(
        options.words[0],
        options.words[1:],
        overrides_of(options),
        dict(os.environ),
        later=bool(options.template or options.sbatch),
    )
    if options.template or options.sbatch:
        from .job.templates import job_script, submit

        if plan.launch.peers is not None:
            raise ArgumentError("launch.peers starts peers on this machine: write a job script for each peer instead")
        if options.template:
            sys.stdout.write(job_script(options.template, plan))
            return 0
        return submit(plan, really=options.submit)
    if plan.launch.peers is not None and Path(plan.script).name == "train.py":
        from .together import describe_peers, together

        if options.dry_run:
            sys.stdout.write(describe_peers(plan, os.environ))
            return 0
        return together(plan, os.environ)
    if options.dry_run:
        sys.stdout.write(describe(plan))
        return 0
    from .supervisor import supervise

    return supervise(plan)


def _rehearse(options: argparse.Namespace) -> int:
    """Have another process do it: it loads torch."""
    from .job.job_plan import script_arguments

    if find_spec("torch") is None:
        raise ArgumentError(f"--rehearse runs the program itself, and {sys.executable} has no torch: use one that has")
    taken = script_arguments(options.words[0], options.words[1:])
    if Path(options.words[0]).name != "train.py":
        raise ArgumentError(f"--rehearse must be of train.py, not of {options.words[0]}")
    if not re.fullmatch("0*[1-9][0-9]{0,6}", options.ranks or ""):
        raise ArgumentError("--rehearse needs the number of ranks of the whole run, below ten million: --ranks N")
    named = {"--ranks": options.ranks, "--device": options.device, "--machine": options.machine, "--rank": options.rank}
    words = [f"{name}={value}" for name, value in named.items() if value is not None]
    others = [each for each in overrides_of(options) if not each.startswith("launch.ranks=")]
    words += [*(["--json"] if options.json else []), *taken.files, *taken.overrides, *others]
    top = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(top), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "megatron.rehearsal", *words]
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, check=False).returncode


def _become_a_rank(options: argparse.Namespace) -> None:
    """Where something else has started the ranks, become the script itself, and never return."""
    from .report.console import log

    found = rank_command(options.words[0], options.words[1:], overrides_of(options), os.environ)
    if found:
        command, said = found
        if said:
            log(said)
        os.execv(command[0], command)


def overrides_of(options: argparse.Namespace) -> list[str]:
    """The options that stand for keys, as overrides."""
    given = vars(options)
    names = {name: name.replace("-", "_") for name in KEYS}
    return [f"launch.{key}={_quoted(given[key])}" for name, key in names.items() if given[key] is not None]


def _quoted(text: str) -> str:
    """A word as YAML reads it: numbers and plain names as they are, anything else in quotes."""
    plain = text.replace("_", "").replace("-", "").replace(".", "").replace("/", "").isalnum() and text.isascii()
    return text if plain and not _is_address(text) else "'" + text.replace("'", "''") + "'"


def _is_address(text: str) -> bool:
    return text.count(".") == 3 or text.lower() in ("null", "true", "false", "yes", "no", "on", "off")


_NAMES = {
    "environment": "RANK and WORLD_SIZE are set",
    "slurm": "inside a step of srun",
    "openmpi": "inside mpirun",
    "mpich": "inside mpiexec",
}


def rank_command(
    script: str, words: Sequence[str], overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], str] | None:
    """The command that this process becomes, and rank 0's note about it, or None where the ranks are ours to start.

    Args:
        script, words, overrides: as in `make_plan`.
        environment: of this process.

    Raises:
        LaunchError: the environment makes no sense.
        ConfigError, ArgumentError: mistakes of the user.
    """
    place = worker_environment(environment)
    if place.world_size == 1 or place.starter not in _NAMES:
        return None
    from .job.job_plan import script_arguments
    from .job.settings import launch_section

    taken = script_arguments(script, words)
    if launch_section(taken.files, [*taken.overrides, *overrides]).runner != "auto":
        return None
    own = ["--", *taken.own] if taken.own and not taken.own[0].startswith("-") else taken.own
    command = [sys.executable, "-u", script, *taken.files, *taken.overrides, *overrides, *own]
    said = f"no runner ({_NAMES[place.starter]}): this process is one of {place.world_size} ranks"
    return command, said if place.rank == 0 else ""


LONGEST = 1 << 20  # characters of a line
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def merged(run: Path) -> Iterator[str]:
    """Lines of all log files of a run directory, merged by their times, each with its rank in front.

    Clocks of different hosts may differ: what is close in time on two hosts may be shown in the wrong order.

    Raises:
        ArgumentError: no log files there.
    """
    folder = run if run.name == "logs" else run / "logs"
    files = sorted(folder.glob("*_[0-9]*.log"))
    if not files:
        raise ArgumentError(f"no log files in {folder}")
    for _, _, name, line in heapq.merge(*(_stamped(path, order) for order, path in enumerate(files))):
        stamp, _, text = line.partition(" ")
        yield f"{stamp} [{name}] {text}\n"


def _stamped(path: Path, order: int) -> Iterator[tuple[str, tuple[int, int], str, str]]:
    """(time, place, name, line) of each line. A line without a time belongs to the one before it."""
    name, stamp = path.stem.replace("rank_", ""), ""
    name = name.lstrip("0") or "0"
    with open(open_plain(path), encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST), "")):
            match = _STAMP.match(line)
            stamp = match.group().strip() if match else stamp
            text = line.rstrip("\n") if match else f"{stamp} {line.rstrip()}"
            yield stamp, (order, number), name, text


def describe(plan: JobPlan) -> str:
    """The plan for people. Nothing is started."""
    from .job.job_plan import commands

    job, choice = plan.job, plan.choice
    where = f"{counted(choice.ranks, 'rank')} on {counted(len(choice.hosts), 'host')}"
    lines = [f"runner {choice.runner} ({choice.reason}): {where}", ""]
    lines.append("commands that this machine would start:")
    for command in commands(plan):
        variables = [f"{name}={shlex.quote(value)}" for name, value in forwarding.shown(command.environment).items()]
        lines.append("  " + " ".join([*variables, shlex.join(command.arguments)]))
    lines += [
        "",
        "every rank executes:",
        f"  {shlex.join(job.command)}",
        f"in {job.directory}",
        "",
        "with these variables:",
    ]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(forwarding.shown(job.environment).items())]
    lines += ["  JOB_CONFIG=(a private file with the configuration)", f"  JOB_CONFIG_SHA256={job.sha256}", ""]
    first = 0
    for host in job.hosts:
        lines += _host(plan, host, first)
        first += len(host.slots)
    lines += ["", "the configuration is valid for that many ranks"]
    if plan.resolved.warnings:
        lines += ["", list_problems(plan.resolved.warnings)]
    return "\n".join(lines) + "\n"


def _host(plan: JobPlan, host: Host, first: int) -> list[str]:
    from .agent.ranks import rank_environment

    size, launch = len(host.slots), plan.launch
    master = (
        launch.master_address or ("127.0.0.1" if len(plan.job.hosts) == 1 else f"(of {plan.job.hosts[0].name})"),
        launch.master_port or "(a free port there)",
    )
    lines = [f"host {host.name}: slots {', '.join(map(str, host.slots))}"]
    extra = {}
    if plan.choice.starter.here:
        extra = devices.visibility(host.slots, plan.job.environment, plan.job.device)
        extra["OMP_NUM_THREADS"] = plan.job.environment.get("OMP_NUM_THREADS", str(devices.threads_per_rank(size)))
    else:
        lines.append(
            "  its agent adds what only the host knows: visible devices, OMP_NUM_THREADS (unless set), network "
            "interface, "
            "fabric defaults"
        )
    for local in range(size if not plan.job.wrapper else 0):
        values = rank_environment(extra, first + local, local, size, plan.job.world_size, master)
        lines.append("  " + " ".join(f"{name}={value}" for name, value in values.items()))
    return lines
