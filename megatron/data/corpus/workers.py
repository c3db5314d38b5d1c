"""Worker processes that encode chunks. Results return in the order of the chunks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import DataError
from ..tokenizer import build_tokenizer
from .encode import Encoded, EncoderChoice, Treatment, build_encoder, encode_chunk
from .inputs import InputChunk

if TYPE_CHECKING:
    from megatron.config.sections.data import TokenizerSection

_state: dict = {}
Result = TypeVar("Result")


Settings = tuple["TokenizerSection", EncoderChoice, Treatment, np.dtype]


class Worker:
    """The encoder of a process."""

    def __init__(self, section: TokenizerSection, choice: EncoderChoice, treatment: Treatment, dtype: np.dtype):
        tokenizer = build_tokenizer(section)
        self.encode, self.eod = build_encoder(tokenizer, choice), tokenizer.eod_id
        self.treatment, self.dtype = treatment, dtype

    def __call__(self, chunk: InputChunk) -> Encoded:
        return encode_chunk(chunk, self.encode, self.treatment, self.eod, self.dtype)


def _start(make: Callable[..., Callable], settings: tuple) -> None:
    """Start a worker process, which ends with its parent, even a killed one, and encodes on one thread."""
    parent = multiprocessing.parent_process()

    def follow(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=follow, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # only in this worker process
    _state["worker"] = make(*settings)


def _work(chunk: InputChunk) -> Any:
    return _state["worker"](chunk)


def encoded(chunks: Iterable[InputChunk], workers: int, *settings: *Settings) -> Iterator[tuple[InputChunk, Encoded]]:
    """Each chunk of texts with its result, in order. `settings` make a `Worker`."""
    return in_order(chunks, workers, Worker, *settings)


def in_order(
    chunks: Iterable[InputChunk], workers: int, make: Callable[..., Callable[[InputChunk], Result]], *settings: Any
) -> Iterator[tuple[InputChunk, Result]]:
    """Each chunk with its result, in order.

    Args:
        chunks: read only a few chunks ahead.
        workers: processes. 1: the calling process.
        make: makes a process's worker from the settings.

    Raises:
        DataError: a worker process ended.
    """
    if workers <= 1:
        worker = make(*settings)
        yield from ((chunk, worker(chunk)) for chunk in chunks)
        return
    waiting: deque[tuple[InputChunk, Future[Result]]] = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (make, settings)) as pool:
        try:
            for chunk in chunks:
                waiting.append((_without_content(chunk), pool.submit(_work, chunk)))
                if len(waiting) > 3 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "workers",
                "a worker process ended (out of memory?)",
                "start again with fewer --workers (nothing is lost)",
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # submitted chunks are no longer needed
            raise


def _without_content(chunk: InputChunk) -> InputChunk:
    return InputChunk(chunk.input, chunk.kind, chunk.start, chunk.end, chunk.line, b"", chunk.compressed)
