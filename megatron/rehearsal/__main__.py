"""`python -m megatron.rehearsal`: what `deepy.py --rehearse` starts, since the launcher itself never loads torch."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
