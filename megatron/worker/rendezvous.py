"""The store where ranks meet, listening on one address.

torch's own `env://` opens it on every address of the machine, where any stranger can read and write it. Here rank 0
listens on the address that the others call. Where the launcher has bound a port for it, rank 0 listens on the very
socket that the launcher bound. Between the choice of a port and its use no other process can take it.

Every user of the host can still connect to the port, and the store asks for no password. The launcher therefore gives
the ranks of each start a secret, in their environment, which only the same user can read. Keys and values of our own
(`SealedStore`) cannot be made without it. torch's own keys have it as a prefix, which a stranger cannot guess but can
list."""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from .network import listen_on

if TYPE_CHECKING:
    from torch.distributed import Store

SECRET = "JOB_STORE_SECRET"  # variable of the ranks
_SEAL = 64  # hexadecimal digits of a SHA-256
_TOGETHER = 1024  # values that the store, which serves one request after another, sends at once
SOCKET = "JOB_STORE_SOCKET"  # number of the descriptor that rank 0 inherits, bound and not yet listening


def open_store(
    rank: int,
    ranks: int,
    address: str,
    port: int,
    timeout: timedelta,
    *,
    one_host: bool = False,
    environment: MutableMapping[str, str] = os.environ,
) -> Store:
    """Enter the store of a run, on every rank.

    Args:
        rank, ranks: this one, and how many.
        address, port: of rank 0.
        timeout: of reads that wait.
        one_host: whether all ranks are on this machine.
        environment: where the launcher says which socket it has bound.

    Raises:
        OSError: on rank 0, the port is taken.
    """
    import torch.distributed as dist  # here, because the launcher does without torch

    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own agent has opened it
        store = next(iter(dist.rendezvous("env://", rank, ranks, timeout=timeout)))[0]
    elif rank:
        store = dist.TCPStore(address, port, ranks, False, timeout, multi_tenant=True)
    else:
        taken = (_inherited(port, environment) or listen_on(address, port, one_host=one_host)).detach()
        store = dist.TCPStore(address, port, ranks, True, timeout, multi_tenant=True, master_listen_fd=taken)
    return dist.PrefixStore(environment.get(SECRET, ""), store)


class SealedStore:
    """Texts in a store that strangers can read and write, under keys that they cannot guess, with proof of who wrote.

    Args:
        of: what they are about, the first part of their names.
        secret: of the run. Without one ("") nothing is protected. None takes that of the environment.
    """

    def __init__(self, store: Store, of: str, secret: str | None = None) -> None:
        self.store, self._of = store, of.encode()
        self._secret = (os.environ.get(SECRET, "") if secret is None else secret).encode()

    def _made(self, *parts: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((self._of, *parts)), "sha256").hex().encode()

    def key(self, name: str) -> str:
        return self._made(b"key", name.encode()).decode()

    def set(self, name: str, text: str) -> None:
        content = text.encode()
        self.store.set(self.key(name), (self._made(b"value", name.encode(), content) + content).decode())

    def get(self, name: str, timeout: timedelta) -> str:
        """The text of a name. A value without the run's seal is ignored: the wait for the right one continues.

        Raises:
            DistStoreError: no rank has set it in time.
        """
        from torch.distributed import DistStoreError

        key, end = self.key(name), time.monotonic() + timeout.total_seconds()
        while True:
            self.store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
            text = self._opened(name, self.store.get(key))
            if text is not None:
                return text
            if time.monotonic() > end:
                raise DistStoreError(f"{name} of the ranks' store is not from a rank of this run")
            time.sleep(0.01)

    def get_all(self, names: Sequence[str], timeout: timedelta) -> list[str]:
        """The texts of some names as of `get`, in one round trip for `_TOGETHER` of them."""
        keys, end = [self.key(name) for name in names], time.monotonic() + timeout.total_seconds()
        self.store.wait(keys, timeout)
        batches = [keys[first : first + _TOGETHER] for first in range(0, len(keys), _TOGETHER)]
        found = [each for batch in batches for each in self.store.multi_get(batch)]
        texts = []
        for name, sealed in zip(names, found, strict=True):
            text = self._opened(name, sealed)
            left = timedelta(seconds=max(0.001, end - time.monotonic()))
            texts.append(self.get(name, left) if text is None else text)
        return texts

    def _opened(self, name: str, sealed: bytes) -> str | None:
        """The text of a value. None without the run's seal."""
        seal, content = sealed[:_SEAL], sealed[_SEAL:]
        right = hmac.compare_digest(seal, self._made(b"value", name.encode(), content))
        return content.decode() if right else None

    def delete(self, name: str) -> None:
        self.store.delete_key(self.key(name))


def leave_store(store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """The last use of the store, on every rank whose work is done. Rank 0, which hosts it, returns last.

    Without this, a rank that is still reading an answer loses the connection and fails at the end of a complete run.

    Args:
        timeout: of rank 0's wait for the others. After it rank 0 returns too: there is no work left that could fail.
    """
    from torch.distributed import DistError

    sealed = SealedStore(store, "left")
    with suppress(DistError):
        if rank:
            sealed.set(str(rank), "")
        elif ranks > 1:
            sealed.get_all([str(other) for other in range(1, ranks)], timeout)


def _inherited(port: int, environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket that the launcher has bound, or None without one or with another job's variable."""
    number = environment.pop(SOCKET, "")
    if not number.isdigit():
        return None
    try:
        os.set_inheritable(int(number), False)
        bound = socket.socket(fileno=int(number))
    except OSError:
        return None
    if bound.family in (socket.AF_INET, socket.AF_INET6) and bound.getsockname()[1] == port:
        return bound
    bound.detach()  # it is not ours to close
    return None
