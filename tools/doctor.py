#!/usr/bin/env python3
"""Check this machine, or all hosts of a hostfile, before a run.

It checks versions, limits, disks, clocks and networks, and with --compare also the speed of each host."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron.config.sections.layout import LaunchSection
from megatron.launch.doctor.doctor import FAIL, Doctor, table
from megatron.launch.job.hosts import HostError, choose_runner


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Exit status: 0 if nothing failed, 1 if something did, 2 for wrong arguments."
    )
    add = parser.add_argument
    add(
        "--hosts",
        metavar="HOSTFILE",
        help="hosts, one `name slots=N` per line. Without it, the Slurm job or this machine",
    )
    add("--include", metavar="HOSTS", help="check only these hosts")
    add("--exclude", metavar="HOSTS", help="exclude these hosts")
    add("--ssh-port", type=int, metavar="PORT", help="port of the ssh servers")
    add("--python", metavar="PATH", help="Python on the hosts (default: the path of this one)")
    add("--timeout", type=float, default=30.0, metavar="SECONDS", help="until every host must have answered")
    add(
        "--compare",
        action="store_true",
        help="also measure products, memory, disk, and the network of hosts in pairs, and name hosts that are slow",
    )
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if not 0 < options.timeout < float("inf"):
        parser.error("--timeout must be a number of seconds above 0")
    if options.ssh_port is not None and not 0 < options.ssh_port < 1 << 16:
        parser.error("--ssh-port must be from 1 to 65535")
    launch = LaunchSection(
        hostfile=options.hosts,
        include=options.include,
        exclude=options.exclude,
        ssh_port=options.ssh_port,
        python=options.python,
    )
    try:
        choice = choose_runner(launch, os.environ)
    except HostError as error:
        sys.stderr.write(f"doctor: {error}\n")
        return 2
    doctor = Doctor(choice, lambda job: choice.commands(job, launch), options.python, options.timeout, options.compare)
    findings = doctor.examine()
    bad = any(each.grade == FAIL for each in findings)
    if options.json:
        json.dump({"ok": not bad, "findings": [each.to_json() for each in findings]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(table(findings, len(choice.hosts)) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
