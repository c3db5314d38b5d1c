#!/usr/bin/env python3
"""Serve the folder of a run to its peers over TCP.

    deepy peers serve runs/shared --bind 0.0.0.0:7000 --members left,right --key peers.key
    deepy peers serve runs/shared --bind 0.0.0.0:7000 --members left,right --key server.key --public FILE

The peers have `peers.folder: tcp://HOST:7000`. With peers.signature: ed25519 the server has a key of its own. FILE is
JSON with the public key of each member and of `server`. A server that is started again continues. Two servers cannot
have one folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.features.feature import load_of  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a local folder for ledger, contributions and states")
    parser.add_argument("--bind", required=True, metavar="HOST:PORT", help="port 0 chooses a free one")
    parser.add_argument("--members", required=True, help="names of peers.members, separated by commas")
    parser.add_argument("--key", required=True, help="file of the secret key")
    parser.add_argument("--public", type=Path, help="peers.public_keys as a JSON file")
    parser.add_argument("--run", default="peers", help="peers.run")
    options = parser.parse_args(arguments)
    if wrong := load_of("peers", "options:wrong_key")(options.key):
        print(f"error: --key {options.key} {wrong}. Make one with: deepy peers key FILE", file=sys.stderr)
        return 2
    try:
        host, _, port = options.bind.rpartition(":")
        public = None if options.public is None else dict(json.loads(options.public.read_text(encoding="utf-8")))
        secret = bytes.fromhex(Path(options.key).expanduser().read_text().strip())
        signer = load_of("peers", "signing:Signer")(secret, public)
        members = {each.strip() for each in options.members.split(",")}
        if wrong := _wrong(members, public, secret):
            raise ValueError(wrong)
        address = host.strip("[]"), int(port)
        server = load_of("peers", "sockets:FolderServer")(options.folder, address, options.run, members, signer)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def ready(host: str, port: int) -> None:
        print(f"serving {options.folder} at {host} port {port} to {', '.join(sorted(members))}", flush=True)

    try:
        load_of("peers", "sockets:serve")(server, ready)
    except KeyboardInterrupt:
        return 130
    return 0


def _wrong(members: set[str], public: dict[str, str] | None, secret: bytes) -> str | None:
    """A mistake in names or keys, which would refuse every peer later."""
    server, name = load_of("peers", "options:SERVER"), load_of("peers", "options:NAME")
    if server in members or not all(map(name.fullmatch, members)):
        return f"--members must be names of letters, digits, - and _, and not {server}: use the names in peers.members"
    if public is None:
        return None
    if set(public) != {*members, server}:
        return f"--public must have one key for each of {', '.join(sorted(members))} and {server}: add or remove keys"
    if public[server] != load_of("peers", "signing:ed25519_public")(secret):
        return f"--key must be the secret key of {server} in --public: print its public key with deepy peers key --show"
    return None


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
