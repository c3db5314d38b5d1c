"""deepy: an end-to-end LLM pretraining framework. One YAML in, a trained model out, on any layout."""

import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import extend_path

__version__ = "0.3.0"
# NVIDIA's Megatron-Core installs `megatron/core` into a folder of its own, without an `__init__.py`. Parts of
# `megatron` elsewhere on sys.path stay importable. Where both have a name, this package's is taken.
__path__ = extend_path(__path__, __name__)

# A script of this project that another interpreter runs than that of its environment.
if find_spec("pydantic") is None and Path(sys.argv[0]).absolute().is_relative_to(Path(__file__).absolute().parents[1]):
    print(
        f"error: {sys.executable} does not have the packages of requirements/base.txt: run this script with "
        ".venv/bin/python (`make venv` makes it), or with an interpreter where they are installed",
        file=sys.stderr,
    )
    sys.exit(2)
