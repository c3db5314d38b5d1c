"""The keys of peers that one command starts on this machine (`launch.peers`), without torch."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from .options import peers_of

EVERY = 30  # steps between two exchanges, by default


def overrides(config: Any, folder: Path) -> dict[str, list[str]]:
    """Overrides of each peer by its name. The first one has the run's directory, and the others have folders in it.

    Args:
        folder: the run's directory. Its folder `peers` gets a secret key, if it has none.
    """
    names, place = [f"p{number + 1}" for number in range(config.launch.peers)], folder / "peers"
    key = place / "key"
    place.mkdir(parents=True, exist_ok=True)
    if not key.exists():
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as made:
            made.write(secrets.token_hex(32) + "\n")
    common = {
        "launch.peers": None, "peers.every": peers_of(config).every or EVERY, "peers.members": names,
        "peers.signature": "shared_key", "peers.key_file": str(key), "peers.folder": str(place / "shared"),
    }  # fmt: skip
    own = {name: {"peers.name": name, "run.dir": str(place / name if at else folder)} for at, name in enumerate(names)}
    return {
        name: [f"{path}={json.dumps(value)}" for path, value in {**common, **values}.items()]
        for name, values in own.items()
    }
