#!/usr/bin/env python3
"""Write one HTML page about one or several runs, which opens without a network.

    deepy report runs/my                      writes runs/my/report.html
    deepy report runs/a runs/b --output ab.html

It has the curves of training, validation and benchmarks over steps, tokens or hours, with abandoned steps in grey. It
also has norms by layer, the time and memory of the steps, the sources of the data and the load of experts. It has
generated samples, the ledger, and the configurations with their differences.

Exit status 2: a run has no metrics, or its files are damaged.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config import ConfigError  # noqa: E402
from megatron.config.admitted import add_flag  # noqa: E402
from megatron.config.file_access import OutputError, keep_inputs, writing  # noqa: E402
from megatron.config.problems import UserError  # noqa: E402

READ = ("metrics.jsonl", "metrics.superseded.jsonl", "ledger.jsonl", "samples.jsonl", "config.yml")


def main(arguments: list[str] | None = None) -> int:
    """Write the page and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--output", help="the page (default: report.html in the run's directory, or for several here)")
    parser.add_argument("--title", help="its title (default: the runs' names)")
    add_flag(parser)
    options = parser.parse_args(arguments)
    folders = list(dict.fromkeys(each.rstrip(os.sep) or os.sep for each in options.runs))
    default = Path(folders[0], "report.html") if len(folders) == 1 else Path("report.html")
    output = default if options.output is None else options.output
    try:
        keep_inputs([output], [path for run in folders for name in READ if (path := Path(run, name)).is_file()])
        from megatron.report.page import write_report
        from megatron.report.page.history import named_runs

        runs = named_runs(folders)
        with writing(output):
            write_report(runs, output, title=options.title or ", ".join(run.name for run in runs))
    except (ConfigError, OutputError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"report: {output} ({os.path.getsize(output) / 2**20:.1f} MB)")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
