"""Packages that only some runs and tools need, and the extra of this package that installs each."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

EXTRAS = {
    "aiohttp": "serve",
    "bokeh": "report",
    "datasets": "data",
    "datatrove": "curate",
    "lm_eval": "eval",
    "nacl": "peers",
    "pyarrow": "data",
    "scipy": "scaling",
    "sentencepiece": "data",
    "tensorboard": "tensorboard",
    "tiktoken": "data",
    "transformers": "hf",
    "wandb": "wandb",
    "warcio": "curate",
}


def missing(module: str | None) -> str | None:
    """The sentence about an optional package that cannot be imported, or None where it is another one."""
    package = (module or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    return f'the package {package} is not installed: pip install "deepy[{extra}]", or requirements/{extra}.txt'


def absent(packages: list[str]) -> Iterator[str]:
    """The given packages that are not installed here."""
    for package in packages:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            yield package


def require(package: str) -> None:
    """End a script with the sentence and status 2 where an optional package that it imports is not installed."""
    if package in absent([package]):
        print(f"error: {missing(package)}", file=sys.stderr)
        sys.exit(2)
