"""A tokenizing job: inputs to a token file, in parallel, resumable after a kill, with the same bytes each time.

Until it is complete, `.bin.part`, `.sizes.part`, `.origin.part` and `.progress` lie next to the output. Every few
seconds the parts are flushed to the disk, and then `.progress` records their valid lengths. A resumed job truncates the
parts to these lengths and continues reading from there."""

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from megatron.config.file_access import keep_inputs
from megatron.config.problems import counted
from megatron.config.sections.data import TokenizerSection

from ..errors import DataError
from ..hashing import content_hash, file_hash
from ..manifest import ENDING, Manifest, hashed, keep_others, read_manifest
from ..token_file import TokenFile, durable, prefix_of, token_dtype, with_ending, write_index
from ..tokenizer import Tokenizer, build_tokenizer, tokenizer_for
from .encode import LITTLE, ORIGIN, Encoded, EncoderChoice, Treatment, build_encoder, choose_encoder, encode_chunk
from .inputs import Input, InputChunk, read_chunks
from .progress import Display, Progress

_state: dict = {}
Item = TypeVar("Item")
Result = TypeVar("Result")


class Worker:
    """The encoder of a process."""

    def __init__(self, section: TokenizerSection, choice: EncoderChoice, treatment: Treatment, dtype: np.dtype):
        tokenizer = build_tokenizer(section)
        self.encode, self.eod = build_encoder(tokenizer, choice), tokenizer.eod_id
        self.treatment, self.dtype = treatment, dtype

    def __call__(self, chunk: InputChunk) -> Encoded:
        return encode_chunk(chunk, self.encode, self.treatment, self.eod, self.dtype)


def end_with_parent() -> None:
    """End this worker process when the one that started it has ended, however that was."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start(make: Callable[..., Callable], settings: tuple) -> None:
    """Start a worker process, which encodes on one thread."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # only in this worker process
    _state["worker"] = make(*settings)


def _work(item: Any) -> Any:
    return _state["worker"](item)


def in_order(
    items: Iterable[Item], workers: int, make: Callable[..., Callable[[Item], Result]], *settings: Any
) -> Iterator[tuple[Item, Result]]:
    """Each chunk, or another item of work, with its result, in order.

    Args:
        items: read only a few items ahead.
        workers: processes. 1: the calling process.
        make: makes a process's worker from the settings.

    Raises:
        DataError: a worker process ended.
    """
    if workers <= 1:
        worker = make(*settings)
        yield from ((item, worker(item)) for item in items)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (make, settings)) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(_work, item)))
                if len(waiting) > 3 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            rule = "a worker process ended (out of memory?)"
            raise DataError("workers", rule, "start again with fewer --workers (nothing is lost)") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # submitted work is no longer needed
            raise


PARTS = (".bin.part", ".sizes.part", ".origin.part")
WRITTEN = (".idx", ".bin", ".origin", ENDING, ".progress", *PARTS, ".idx.part")  # files that a job writes or removes
EXAMPLES = 20  # bad records that are kept with their line numbers


@dataclass(frozen=True)
class TokenizeJob:
    """A tokenizing job. Documents are written in the order of the inputs."""

    inputs: list[Input]
    output: Path  # prefix of the pair
    tokenizer: TokenizerSection
    treatment: Treatment
    workers: int = 1
    encoder: str = "auto"  # "auto", "gigatoken" or "tokenizer"
    bad: str = "skip"  # "skip" bad records or be "fatal" about them. Both count them.
    save_every: float = 10.0  # seconds between two safe states
    overwrite: bool = False
    hash_inputs: bool = True  # put the inputs' SHA-256 into the manifest
    version: str = ""  # of this program, for the manifest
    identity: str = ""  # of the inputs' contents. Default: their names, sizes and times.
    at_once: bool = False  # begin with the tokenizer's own encoder while a faster one is checked

    @property
    def prefix(self) -> Path:
        return prefix_of(self.output)

    def file(self, ending: str) -> Path:
        return with_ending(self.prefix, ending)

    def reads(self) -> list[Path]:
        """The files that it reads."""
        found = [entry.path for entry in self.inputs if entry.path is not None]
        for path in (Path(each) for each in (self.tokenizer.path, self.tokenizer.merges) if each is not None):
            found += sorted(path.iterdir()) if path.is_dir() else [path]
        return found


@dataclass(frozen=True)
class TokenizeResult:
    """A finished job. `resumed`: it continued an earlier start. `kept`: it was finished already."""

    manifest: Manifest
    progress: Progress
    choice: EncoderChoice
    seconds: float
    resumed: bool = False
    kept: bool = False


def run(job: TokenizeJob, display: Display | None = None) -> TokenizeResult:
    """Run a job, or finish it.

    Raises:
        DataError: an input is missing or damaged, the output exists already, or a bad record was fatal.
    """
    begin = time.monotonic()
    tokenizer = tokenizer_for(job.tokenizer, job.treatment.append_eod)
    keep_inputs(map(job.file, WRITTEN), job.reads())
    keep_others(job.prefix)
    job.prefix.parent.mkdir(parents=True, exist_ok=True)
    key = job_key(job, tokenizer)
    finished = _make_room(job, key)
    if finished is not None:
        choice = EncoderChoice(finished.encoder, "finished already")
        return TokenizeResult(finished, _progress_of(finished), choice, 0.0, kept=True)
    progress = Progress.load(job.file(".progress"), key)
    resumed = progress is not None
    progress = progress or Progress(key, per_input=[[0, 0] for _ in job.inputs])
    size = sum(entry.path.stat().st_size for entry in job.inputs if entry.path is not None)
    share = size // max(job.workers, 1) if all(entry.path for entry in job.inputs) else None
    dtype, display = token_dtype(tokenizer.size), display or Display(size, quiet=True)
    choice = choose_encoder(tokenizer, "tokenizer" if job.at_once else job.encoder, share)
    if not progress.publishing:
        try:
            if job.at_once and (share is None or share >= LITTLE):
                with ThreadPoolExecutor(1) as pool:
                    checked = pool.submit(choose_encoder, tokenizer, job.encoder)
                    _encode(job, progress, choice, dtype, display, checked.done)
                    choice = checked.result()
            _encode(job, progress, choice, dtype, display)
            _complete(job, progress, dtype)
        except DataError as error:
            if not isinstance(error.__cause__, OSError):  # this job cannot finish, only a corrected one
                _discard(job)
            raise
    manifest = _publish(job, progress, choice, tokenizer, dtype)
    return TokenizeResult(manifest, progress, choice, time.monotonic() - begin, resumed=resumed)


def _make_room(job: TokenizeJob, key: str) -> Manifest | None:
    """The manifest of this job if it is finished. Refuses to overwrite another pair. With `overwrite`, existing files
    are removed."""
    if job.overwrite:
        _discard(job)
    if not job.file(".idx").exists() or job.file(".progress").exists():
        return None
    manifest = read_manifest(job.prefix)
    if manifest is None or manifest.job != key:
        raise DataError(job.file(".idx"), "another token file is there already", "use another --output, or --overwrite")
    TokenFile(job.prefix)
    return manifest


def _discard(job: TokenizeJob) -> None:
    for ending in WRITTEN:
        job.file(ending).unlink(missing_ok=True)


def _progress_of(manifest: Manifest) -> Progress:
    return Progress(
        manifest.job,
        documents=manifest.documents,
        tokens=manifest.tokens,
        largest=manifest.largest,
        bad=manifest.options["bad"],
        empty=manifest.options["empty"],
        text_bytes=manifest.options["text_bytes"],
    )


def job_key(job: TokenizeJob, tokenizer: Tokenizer) -> str:
    """Hash of everything that determines the pair."""
    return content_hash(
        repr((
            job.identity or [entry.state() for entry in job.inputs],
            tokenizer.hash,
            tokenizer.eod_id,
            asdict(job.treatment),
            job.bad,
        ))
    )


class _Parts:
    """The three growing files, truncated to their valid lengths."""

    def __init__(self, job: TokenizeJob, progress: Progress, dtype: np.dtype):
        lengths = (progress.tokens * dtype.itemsize, progress.documents * 4, progress.documents * ORIGIN.itemsize)
        self.files: list[BinaryIO] = []
        for ending, length in zip(PARTS, lengths):
            path = job.file(ending)
            held = path.stat().st_size if path.exists() else 0
            if held < length:
                raise DataError(path, f"it has {held} bytes, but {length} were written", "start again with --overwrite")
            file = open(path, "r+b" if path.exists() else "w+b")
            file.truncate(length)
            file.seek(length)
            self.files.append(file)

    def append(self, result: Encoded) -> None:
        for file, array in zip(self.files, (result.tokens, result.sizes, result.origin)):
            file.write(array.tobytes())

    def save(self) -> None:
        for file in self.files:
            durable(file)

    def close(self) -> None:
        for file in self.files:
            file.close()


def _chunks(job: TokenizeJob, progress: Progress) -> Iterator[InputChunk]:
    first, position, line = progress.input, progress.position, progress.line
    for number in range(first, len(job.inputs)):
        entry = job.inputs[number]
        entry.check()
        for chunk in read_chunks(number, entry, position, line, job.treatment.key):
            entry.check(inside=True)
            yield chunk
        entry.check()
        position, line = 0, 1


def _encode(
    job: TokenizeJob,
    progress: Progress,
    choice: EncoderChoice,
    dtype: np.dtype,
    display: Display,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Encode the rest of the inputs, or a part of it: until `enough`."""
    parts = _Parts(job, progress, dtype)
    done = [0, *np.cumsum([entry.path.stat().st_size if entry.path else 0 for entry in job.inputs]).tolist()]
    read, saved = done[progress.input], time.monotonic()
    display.show(progress, read)
    try:
        settings = (job.tokenizer, choice, job.treatment, dtype)
        for chunk, result in in_order(_chunks(job, progress), job.workers, Worker, *settings):
            _count(job, progress, chunk, result)
            parts.append(result)
            read = done[chunk.input] + chunk.compressed
            display.show(progress, read)
            if time.monotonic() - saved >= job.save_every:
                parts.save()
                progress.save(job.file(".progress"))
                saved = time.monotonic()
            if enough():
                break
        parts.save()
        progress.save(job.file(".progress"))
    finally:
        parts.close()
    display.show(progress, done[-1], final=True)


def _count(job: TokenizeJob, progress: Progress, chunk: InputChunk, result: Encoded) -> None:
    for line, reason in result.bad:
        if job.bad == "fatal":
            raise DataError(f"{job.inputs[chunk.input].name}:{line}", reason, "fix the line, or use --bad skip")
        progress.bad += 1
        if len(progress.examples) < EXAMPLES:
            progress.examples.append([job.inputs[chunk.input].name, line, reason])
    progress.input, progress.position = chunk.input, chunk.end
    progress.line = chunk.line + (chunk.end - chunk.start if job.inputs[chunk.input].unit == "rows" else result.lines)
    progress.documents += len(result.sizes)
    progress.tokens += len(result.tokens)
    progress.text_bytes += result.text_bytes
    progress.empty += result.empty
    progress.largest = max(progress.largest, int(result.tokens.max()) if len(result.tokens) else 0)
    progress.per_input[chunk.input][0] += len(result.sizes)
    progress.per_input[chunk.input][1] += len(result.tokens)


def _complete(job: TokenizeJob, progress: Progress, dtype: np.dtype) -> None:
    """Write the index. Only renames follow."""
    if progress.documents == 0:
        raise DataError(
            job.prefix,
            f"no document was found in {counted(len(job.inputs), 'input')} ({progress.bad:,} bad, {progress.empty:,} "
            "empty)" + "".join(f"\n    {name}:{line}: {reason}" for name, line, reason in progress.examples[:3]),
            "check --key, --format and the inputs",
        )
    sizes = np.memmap(job.file(".sizes.part"), dtype="<i4", mode="r")
    with open(job.file(".idx.part"), "wb") as file:
        write_index(file, sizes, dtype)
        durable(file)
    progress.publishing = True
    progress.save(job.file(".progress"))


def _publish(
    job: TokenizeJob, progress: Progress, choice: EncoderChoice, tokenizer: Tokenizer, dtype: np.dtype
) -> Manifest:
    """Rename the parts, the index last: without it there is no pair. It can be repeated after a kill."""
    for ending in (".bin", ".origin"):
        if job.file(f"{ending}.part").exists():
            os.replace(job.file(f"{ending}.part"), job.file(ending))
    index = job.file(".idx.part") if job.file(".idx.part").exists() else job.file(".idx")
    options = asdict(job.treatment)
    manifest = Manifest(
        tokenizer=tokenizer.facts,
        documents=progress.documents,
        tokens=progress.tokens,
        largest=progress.largest,
        dtype=dtype.name,
        inputs=_described(job, progress),
        origin=",".join(sorted({entry.unit for entry in job.inputs})),
        options={**options, "bad": progress.bad, "empty": progress.empty, "text_bytes": progress.text_bytes},
        encoder=choice.name,
        version=job.version,
        job=progress.key,
        **hashed(job.file(".bin"), index),
    )
    manifest.write(job.prefix)
    if job.file(".idx.part").exists():
        os.replace(job.file(".idx.part"), job.file(".idx"))
    TokenFile(job.prefix)
    job.file(".sizes.part").unlink(missing_ok=True)
    job.file(".progress").unlink(missing_ok=True)
    return manifest


def _described(job: TokenizeJob, progress: Progress) -> list[dict]:
    paths = {entry.path for entry in job.inputs if entry.path is not None}
    with ThreadPoolExecutor(max(job.workers, 1)) as pool:
        hashes = dict(zip(paths, pool.map(file_hash, paths))) if job.hash_inputs else {}
    return [
        {
            "name": entry.name,
            "kind": entry.kind,
            "unit": entry.unit,
            "bytes": entry.path.stat().st_size if entry.path else None,
            "sha256": hashes.get(entry.path) if entry.path else None,
            "documents": documents,
            "tokens": tokens,
        }
        for entry, (documents, tokens) in zip(job.inputs, progress.per_input)
    ]
