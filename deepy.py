#!/usr/bin/env python3
"""deepy.py [options] SCRIPT.py a.yml b.yml ... key.path=value ...: start a script on as many ranks as the run has."""

import sys

from megatron.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
