"""The exchange of small facts between ranks that save or load together."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.worker.rendezvous import SealedStore


class Communicator(Protocol):
    """The ranks that save or load together.

    Values are JSON. Tensors never travel this way. The traffic of `gather` grows with the square of the number of
    ranks, so it is for rare cases (see `all_problems`) or a few bytes per rank. The other methods cost their values'
    size."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Return when every rank has called."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank."""

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all ranks in rank order, on rank 0. None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Other ranks' arguments are ignored."""

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has set it. All ranks give the same number of flags."""


def all_problems(communicator: Communicator, problems: Iterable[str]) -> list[str]:
    """The problems of all ranks, each once, on every rank. Without a problem only a flag is sent."""
    own = list(dict.fromkeys(problems))
    if not communicator.any_rank([bool(own)])[0]:
        return []
    return list(dict.fromkeys(problem for found in communicator.gather(own) for problem in found))


def from_rank_0(
    communicator: Communicator, work: Callable[[], Any], *errors: type[Exception]
) -> tuple[Any, str | None]:
    """Rank 0's result of `work` (JSON), or the text of one of these errors of it, on every rank."""
    answer = None
    if communicator.rank == 0:
        try:
            answer = [work(), None]
        except errors as error:
            answer = [None, str(error)]
    found, failure = communicator.broadcast(answer)
    return found, failure


class Solo:
    """A single process."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        return [bool(flag) for flag in flags]


class GroupCommunicator:
    """Over a `torch.distributed` group. Saving in the background needs a group of its own.

    Args:
        group: a process group. None: the default group.
        device: device of the messages ("cpu" for gloo).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def barrier(self) -> None:
        self.any_rank([False])

    def gather(self, value: Any) -> list[Any]:
        # As JSON in byte tensors: the object collectives of torch would unpickle what they receive.
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        size = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(sizes, size, group=self.group)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: message.numel()] = message
        received = torch.zeros(self.size * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(received, padded, group=self.group)
        texts = received.cpu().view(self.size, longest)
        return [json.loads(bytes(row[: int(length)].numpy())) for row, length in zip(texts, sizes.cpu(), strict=True)]

    def collect(self, value: Any) -> list[Any] | None:
        values = self.gather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        message = torch.frombuffer(bytearray(json.dumps(value if self.rank == 0 else None).encode()), dtype=torch.uint8)
        size = torch.tensor([message.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(size, group_src=0, group=self.group)
        message = (
            message.to(self.device) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        )
        dist.broadcast(message, group_src=0, group=self.group)
        return json.loads(bytes(message.cpu().numpy()))

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        together = torch.tensor(list(flags), dtype=torch.uint8, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in together.tolist()]


class StoreCommunicator:
    """Over the key-value store of the rendezvous: without connections between ranks, and safe in a thread of its own.

    Rank 0 collects and answers: one small message in and one list out per rank. A second gloo group would open a
    connection between every two of 10,000 ranks.

    Args:
        store: of the default process group, or another that all ranks share.
        name: separates this communicator's messages from others.
        timeout: seconds to wait for the slowest rank.
        secret: of the run. None: the one in the environment.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, timeout: float = 3600.0, secret: str | None = None
    ) -> None:
        self._store = SealedStore(store, f"communicator/{name}", secret)
        self._timeout = timedelta(seconds=timeout)
        self.rank, self.size = rank, size
        self._round = 0

    def barrier(self) -> None:
        self._round_of(None, lambda _: "null")

    def gather(self, value: Any) -> list[Any]:
        return self._round_of(value, lambda texts: f"[{','.join(texts)}]")[1]

    def collect(self, value: Any) -> list[Any] | None:
        texts, _ = self._round_of(value, lambda _: "null")
        return None if texts is None else [json.loads(text) for text in texts]

    def broadcast(self, value: Any) -> Any:
        return self._round_of(value if self.rank == 0 else None, lambda texts: texts[0])[1]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        def together(texts: list[str]) -> str:
            return json.dumps([any(each) for each in zip(*map(json.loads, texts), strict=True)])

        own: list[bool] = self._round_of([bool(flag) for flag in flags], together)[1]
        return own

    def _round_of(self, value: Any, answer: Callable[[list[str]], str]) -> tuple[list[str] | None, Any]:
        """Every rank sends its value to rank 0, which sends one answer to all.

        Returns:
            All ranks' texts on rank 0, and the answer.
        """
        self._round += 1
        own, result, texts = f"{self._round}/{self.rank}", f"{self._round}/all", None
        self._store.set(own, json.dumps(value))
        if self.rank == 0:
            texts = self._store.get_all([f"{self._round}/{rank}" for rank in range(self.size)], self._timeout)
            self._store.set(result, answer(texts))
        values = json.loads(self._store.get(result, self._timeout))
        with suppress(dist.DistError):  # rank 0, whose store this is, may already have ended with the answer's error
            self._store.delete(own)  # rank 0 has read it. It would delete 10,000 values one after another
        # Every rank has read the previous result: it enters a round only after that.
        if self.rank == 0 and self._round > 1:
            self._store.delete(f"{self._round - 1}/all")
        return texts, values


SOLO = Solo()
