"""The store where ranks meet, listening on one address.

torch's own `env://` opens it on every address of the machine, where any stranger can read and write it. Here rank 0
listens on the address that the others call, and, where the launcher has bound a port for it, on the very socket that
the launcher bound: between the choice of a port and its use nobody else can take it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from .network import listen_on

if TYPE_CHECKING:
    from torch.distributed import Store

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
    """Enter the store of a run; on every rank.

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
        return next(iter(dist.rendezvous("env://", rank, ranks, timeout=timeout)))[0]
    if rank:
        return dist.TCPStore(address, port, ranks, False, timeout, multi_tenant=True)
    listener = _inherited(port, environment) or listen_on(address, port, one_host=one_host)
    return dist.TCPStore(address, port, ranks, True, timeout, multi_tenant=True, master_listen_fd=listener.detach())


def leave_store(store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """The last use of the store, on every rank whose work is done. Rank 0, which hosts it, returns last.

    Without this, a rank that is still reading an answer loses the connection and fails at the end of a complete run.

    Args:
        timeout: of rank 0's wait for the others. After it rank 0 returns too: there is no work left that could fail.
    """
    from torch.distributed import DistError

    with suppress(DistError):
        if rank:
            store.set(f"left/{rank}", "")
        else:
            store.wait([f"left/{other}" for other in range(1, ranks)], timeout)


def _inherited(port: int, environment: MutableMapping[str, str]) -> socket.socket | None:
    """The socket that the launcher has bound; None if there is none, or the variable is of another job."""
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
