"""The launcher's own options. Nothing here loads the configuration: a shell asks for them at every tabulator."""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, NoReturn

from megatron.config.registry import INSIDE, RUNNER

# Options that are short for a key of the configuration.
KEYS = {
    "ranks": ("N", "launch.ranks: processes on each host"),
    "hostfile": ("FILE", "launch.hostfile: hosts, one `name slots=N` per line"),
    "include": ("HOSTS", "launch.include: hosts and slots to use, `a@b:0,1`"),
    "exclude": ("HOSTS", "launch.exclude: hosts and slots to exclude"),
    "runner": ("NAME", f"launch.runner: {', '.join(('auto', *INSIDE[RUNNER]))}, or one of an extension"),
    "master-address": ("ADDRESS", "launch.master_address: address of rank 0"),
    "master-port": ("PORT", "launch.master_port: port of rank 0"),
    "interface": ("NAME", "launch.interface: network interface for collectives"),
    "restarts": ("N", "launch.restarts: starts after failures"),
    "console": ("WHO", "launch.console: first (only rank 0 prints) or all"),
}
# Names of options in other launchers.
ELSEWHERE = dict.fromkeys(
    ("gpus", "gpu", "num-gpus", "ngpus", "nproc", "nproc-per-node", "np", "rank", "num-processes", "world-size"),
    "ranks",
) | {"hosts": "hostfile", "num-nodes": "hostfile", "nnodes": "hostfile", "nodes": "hostfile", "dryrun": "dry-run"}
NAMES = (*KEYS, "dry-run", "sbatch", "submit", "print", "logs")


def meant(word: str) -> str:
    """A question for an option that the launcher does not have: did you mean another? Empty if none is near."""
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    near = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f": did you mean --{near[0]}?" if near else ""


REHEARSAL = ("--device", "--machine", "--rank", "--json")  # options that only --rehearse reads
INQUIRIES = ("--logs", "--status", "--stacks")  # of a run
ACTIONS = (*INQUIRIES, "--rehearse", "--dry-run", "--sbatch", "--print")  # each in the place of starting
USAGE = "deepy.py [options] SCRIPT.py a.yml b.yml ... key.path=value ..."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        found = re.search(r"unrecognized arguments: (\S+)", message)
        super().error(message + (meant(found[1]) if found else ""))


def parser(script: str | None = None) -> argparse.ArgumentParser:
    """The launcher's own options: those before the script, or all options of the verb that starts `script`."""
    verb = Path(script).stem if script else None
    made = _Parser(
        prog=f"deepy {verb}" if verb else "deepy.py",
        usage=f"deepy {verb} [options] a.yml b.yml ... key.path=value ..." if verb else USAGE,
        allow_abbrev=False,
        description=f"Run {verb or 'a script'}{'.py' * bool(verb)} on all ranks, here or on many hosts.",
        epilog="Exit status: 0 only if all went well, 2 for mistakes in the configuration, 128 + n after signal n, 255 "
        "if a host was lost. Otherwise it is the status of the rank that failed first.",
    )
    for name, (what, meaning) in KEYS.items():
        made.add_argument(f"--{name}", metavar=what, help=meaning)
    made.add_argument("--dry-run", action="store_true", help="check everything and only print each host's command")
    rehearsal = {
        "--rehearse": "report the needs of --ranks ranks: run one of each kind on tensors without values, no start",
        "--device": "with --rehearse: a device of the ranks, such as h100",
        "--machine": "with --rehearse: further devices, as `deepy bench machine` writes",
        "--rank": "with --rehearse: the ranks to rehearse",
        "--json": "with --rehearse: one JSON document",
    }
    metavars = {"--device": "NAME", "--machine": "FILE", "--rank": "N,..."}
    for name, meaning in rehearsal.items():  # only train.py can be rehearsed
        form: dict[str, Any] = {"metavar": metavars[name]} if name in metavars else {"action": "store_true"}
        made.add_argument(name, help=meaning if verb in (None, "train") else argparse.SUPPRESS, **form)
    made.add_argument("--sbatch", action="store_true", help="write a Slurm script from launch.batch and print its path")
    made.add_argument("--submit", action="store_true", help="with --sbatch: submit the script too")
    made.add_argument(
        "--print", choices=("sbatch", "pbs", "k8s"), dest="template", help="print a job script or manifest for this run"
    )
    made.add_argument("-d", "--conf_dir", metavar="FOLDER", help="folder of the configuration files, as in GPT-NeoX")
    made.add_argument("--logs", metavar="RUN", help="print the ranks' log files of a run directory, merged by time")
    made.add_argument("--status", metavar="RUN", help="show where a running job's ranks are, and which wait for which")
    made.add_argument("--stacks", metavar="RUN", help="print the Python stack of every rank of a running job")
    words = "a.yml ... key.path=value ..." if verb else "SCRIPT.py a.yml ... key.path=value ..."
    made.add_argument("words", nargs=argparse.REMAINDER, metavar=words)
    return made
