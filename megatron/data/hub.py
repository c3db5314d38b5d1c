"""A quick check whether the model hub answers. Its own library takes half a minute to fail."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from urllib.parse import urlsplit

PATIENCE = 2.5  # seconds for an answer to a connection. The library's own variable replaces it


def unreachable(endpoint: str) -> str | None:
    """Why a server cannot be reached, or None if it, or the proxy on the way to it, accepts a connection.

    Args:
        endpoint: its URL.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        way = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = way.hostname or "", way.port or (443 if way.scheme == "https" else 80)
    patience = _number(os.environ.get("HF_HUB_ETAG_TIMEOUT")) or PATIENCE
    outcome: list[str | None] = []

    def call() -> None:
        try:
            socket.create_connection((host, port), patience).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(f"{host} cannot be reached ({error.strerror or error})")

    thread = threading.Thread(target=call, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(patience)
    late = f"{host} does not answer within {patience:g} seconds (HF_HUB_ETAG_TIMEOUT gives it more)"
    return outcome[0] if outcome else late


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
