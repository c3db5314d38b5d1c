#!/usr/bin/env python3
"""Show the use of a run's time, from the device's peak to wall-clock MFU.

It also recommends the first change to make.

    deepy profile RUN [--output FILE.png] [--json]
    deepy profile RUN --device h100 --machine machine.yml

Bands sum to the wall time of all starts of the run. Each is measured by the run itself, or derived. With
logging.profile.start=N the run traces some steps, and more bands are measured (docs/planning.md).

Exit status 2: there is no such run, or a file of it is damaged.
"""

from __future__ import annotations

import sys

if __name__ == "profile":  # a script next to this file imports Python's own module of this name
    import importlib.util
    import sysconfig

    _own = importlib.util.spec_from_file_location("profile", sysconfig.get_path("stdlib") + "/profile.py")
    assert _own is not None and _own.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(_own)
    _own.loader.exec_module(sys.modules["profile"])
else:
    import argparse
    import json
    from pathlib import Path

    ROOT = Path(__file__).resolve().parents[1]
    if __name__ == "__main__":
        sys.path[0] = str(ROOT)

    from megatron.config import ConfigError
    from megatron.config.admitted import add_flag
    from megatron.config.file_access import OutputError, keep_inputs, writing
    from megatron.config.problems import UserError

    READ = ("config.yml", "ledger.jsonl", "metrics.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """Show the account and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument("--device", help="a device of the table (default: the run's)")
    parser.add_argument("--machine", metavar="FILE", help="further devices (megatron/plan/devices.yml)")
    parser.add_argument("--output", metavar="FILE.png", help="draw the bands")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_flag(parser)
    options = parser.parse_args(arguments)
    try:
        inputs = [Path(options.run, name) for name in READ]
        if options.output:
            keep_inputs([options.output], [each for each in inputs if each.is_file()])
        from megatron.plan.time_bands import advice, picture, profile, text

        found = profile(options.run, options.device, options.machine)
        if options.output:
            with writing(options.output):
                picture(found, options.output)
    except (ConfigError, OutputError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({**found.to_json(), "advice": advice(found)}, indent=2))
        return 0
    print(text(found))
    if options.output:
        print(f"picture: {options.output}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
