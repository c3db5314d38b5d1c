#!/usr/bin/env python3
"""Make a peer's secret key, and print its public key.

    deepy peers key ~/peer.key           the file must not exist. Only its owner can read it
    deepy peers key ~/peer.key --show    print the public key of an existing one

Without PyNaCl or cryptography there is no public key, and only `peers.signature: shared_key` is possible.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", action="store_true", help="print the public key of an existing file")
    options = parser.parse_args(arguments)
    from megatron.config.features.feature import load_of

    file = options.file.expanduser()
    if not options.show:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as made:
                made.write(secrets.token_hex(32) + "\n")
        except OSError as error:
            print(f"error: {file}: {error.strerror}. Give the path of a new file", file=sys.stderr)
            return 2
    if wrong := load_of("peers", "options:wrong_key")(str(file)):
        print(f"error: {file}: {wrong}", file=sys.stderr)
        return 2
    try:
        public = load_of("peers", "signing:ed25519_public")(bytes.fromhex(file.read_text().strip()))
    except ImportError:
        print("no public key: neither PyNaCl nor cryptography is installed (pip install 'deepy[peers]')")
        return 0
    print(public)
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
