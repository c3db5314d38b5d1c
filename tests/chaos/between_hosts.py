"""tools/chaos.py between hosts made of network namespaces. Needs root.

python -m tests.chaos.between_hosts HOSTS my.yml [key.path=value ...] [options of chaos.py]
"""

from __future__ import annotations

import sys

from megatron.trials.chaos import SPARES
from tests.chaos.hosts import TrialHosts
from tools.chaos import main

if __name__ == "__main__":
    with TrialHosts(int(sys.argv[1]) + SPARES) as hosts:
        sys.exit(main(["--ranks", "1", *sys.argv[2:]], hosts))
