"""The keys of peers that one command starts on this machine (`launch.peers`), without torch."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from .options import peers_of

EVERY = 30  # steps between two exchanges, by default


def overrides(config: Any, folder: Path) -> tuple[dict[str, list[str]], Path]:
    """Overrides of each peer by its name, and the file of their secret key. Makes no file.

    The first peer has the run's directory and name. The others have folders in it, and names of their own.

    Args:
        folder: the run's directory.
    """
    names, place = [f"p{number + 1}" for number in range(config.launch.peers)], folder / "peers"
    key = place / "key"
    common = {
        "launch.peers": None, "peers.every": peers_of(config).every or EVERY, "peers.members": names,
        "peers.signature": "shared_key", "peers.key_file": str(key), "peers.folder": str(place / "shared"),
    }  # fmt: skip
    own: dict[str, dict[str, str]] = {name: {"peers.name": name, "run.dir": str(folder)} for name in names}
    for name in names[1:]:
        own[name] |= {"run.dir": str(place / name), "run.name": f"{config.run.name}-{name}"}
    return {
        name: [f"{path}={json.dumps(value)}" for path, value in {**common, **values}.items()]
        for name, values in own.items()
    }, key


def make_key(key: Path) -> None:
    """Make a secret key that only its owner can read, if there is none."""
    key.parent.mkdir(parents=True, exist_ok=True)
    if not key.exists():
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as made:
            made.write(secrets.token_hex(32) + "\n")
