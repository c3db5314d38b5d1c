#!/usr/bin/env python3
"""Predict costs of peers: utilisation over slow links, and healing against restarts.

    deepy peers plan --parameters 72e9 --peers 17 --compute 1200 --upload 1e9 --download 1e9
    deepy peers plan --devices 1024 4096 16384 65536 --peers 8 --save 30 --start 600 --notice 60

The first form is of sparseloco, and with --dense of diloco in fp32. The second compares one job that restarts from
checkpoints with peers that share gradients and take over from each other. They assume one failure in
50,700 hours of a device (arXiv 2407.21783).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = parser.add_argument
    number("--peers", type=float, required=True, help="contributors of a round")
    number("--parameters", type=float, help="of the model")
    number("--compute", type=float, default=1200.0, help="seconds of the steps of a round")
    number("--upload", type=float, default=1e9, help="bits per second")
    number("--download", type=float, default=1e9, help="bits per second")
    number("--top", type=int, default=64, help="peers.top: values sent of each 4,096")
    number("--dense", action="store_true", help="all differences, in fp32")
    number("--utilisation", type=float, default=0.945, help="also print the link that reaches this share")
    number("--devices", type=int, nargs="+", help="of all peers together: compare healing with restarts")
    number("--save", type=float, default=30.0, help="seconds for which a checkpoint stops a job")
    number("--start", type=float, default=600.0, help="seconds of a restart of all ranks")
    number("--notice", type=float, default=60.0, help="seconds until a job notices a failure")
    number("--timeout", type=float, default=30.0, help="peers.timeout, in seconds")
    number("--heal", type=float, default=948.0, help="seconds until a lost peer contributes again")
    number("--overhead", type=float, default=0.0, help="share by which steps of peers are slower")
    number("--json", action="store_true")
    options = parser.parse_args(arguments)
    values = [value for value in vars(options).values() if isinstance(value, float)]
    if options.peers < 1 or min(values) < 0 or not 0 < options.utilisation < 1 or min(options.devices or [1]) < 1:
        parser.error("numbers must be positive, --peers at least 1, and --utilisation between 0 and 1")
    if min(options.compute, options.upload, options.download, options.save) <= 0:
        parser.error("--compute, --upload, --download and --save must be above 0")
    if options.parameters is None and not options.devices:
        parser.error("give --parameters, --devices, or both")
    from megatron.config.features.feature import load_of

    found: dict[str, object] = {}
    if options.parameters is not None:
        top = None if options.dense else options.top
        place = options.parameters, options.peers, options.compute
        link = load_of("peers", "costs:over_link")(*place, options.upload, options.download, top)
        found["link"] = vars(link)
        found["needed_bits_per_second"] = load_of("peers", "costs:link_for")(*place, options.utilisation, top)
    rows = []
    for devices in options.devices or ():
        at = options.save, options.start, options.notice, options.timeout, options.heal, options.overhead
        rows.append({"devices": devices, **vars(load_of("peers", "costs:with_failures")(devices, options.peers, *at))})
    if rows:
        found["failures"] = rows
    print(json.dumps(found) if options.json else "\n".join(_lines(found, options.utilisation)))
    return 0


def _lines(found: dict, utilisation: float) -> list[str]:
    lines = []
    if link := found.get("link"):
        lines += [
            f"a contribution has {link['sent'] / 1e9:.3g} GB, and a peer receives {link['received'] / 1e9:.3g} GB",
            f"both take {link['seconds']:.0f} s: utilisation {link['utilisation']:.1%}",
            f"{utilisation:.1%} needs {found['needed_bits_per_second'] / 1e9:.3g} Gbit/s in each direction",
        ]
    for row in found.get("failures", ()):
        better = "healing" if row["healing"] > row["restart"] else "restarts"
        lines.append(
            f"{row['devices']:>7,} devices, a failure every {row['between'] / 3600:.3g} h: "
            f"restarts {row['restart']:.1%} useful, healing {row['healing']:.1%}: {better}"
        )
    return lines


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
