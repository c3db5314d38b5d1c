"""Measure speed, memory and messages: `python -m bench NAME [options]`, or `deepy bench NAME`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))

from bench.runner import main  # noqa: E402
from megatron.pipes import piped  # noqa: E402

if __name__ == "__main__":
    sys.exit(piped(main))
