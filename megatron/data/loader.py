"""The loader: a data parallel rank's part of a step, as a function of the step, read ahead in the background."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from megatron.config import Config
from megatron.config.features.feature import share_of
from megatron.config.sequences import stage_at

from .batch import StepBatch
from .errors import DataError
from .hashing import batch_hash, sample_hash
from .manifest import DamagedTokens
from .plan import SamplePlan, SyntheticPlan
from .plan_builder import build_plan
from .sample import Sample, documents_and_positions
from .skipped_batches import LeftOut


class Loader:
    """Reads one data parallel rank's part of each step.

    `step(s)` depends only on (configuration, skipped batches, s, data_rank). Threads only prepare the next steps.

    Attributes:
        plan: the samples.
        steps: steps of the set: of the run, or of one evaluation (which starts at 0 each time: a fixed probe).
        left_out: skipped batches. See `leave_out`.
        share: number of the share of each batch that it reads.
    """

    def __init__(
        self,
        plan: SamplePlan | SyntheticPlan,
        *,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        workers: int = 1,
        prefetch: int = 2,
        length: Callable[[int], int] | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        """
        Args:
            length: step -> tokens of the samples that its own are cut into. None keeps them whole.
            share: of the plan's batches that this run reads, and the number of shares. Each is a range of samples.
        """
        self.share, self._shares = share
        per_pass = micro_batch_size * data_ranks * self._shares
        if plan.batches.common % per_pass:
            rule = (
                f"{plan.batches} samples must be a multiple of micro_batch_size * data parallel "
                f"size = {micro_batch_size} * {data_ranks}"
            )
            raise DataError("training.global_batch_size", rule, "change one of them")
        self.plan, self.steps, self.left_out = plan, plan.steps, LeftOut()
        self._skipped, self.micro_batch_size = self.left_out, micro_batch_size
        self.data_rank, self.data_ranks, self._length = data_rank, data_ranks, length
        self._prefetch = prefetch if workers else 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if self._prefetch else None
        self._ready: dict[int, Future[StepBatch]] = {}

    def leave_out(self, left_out: LeftOut) -> None:
        """Skip these batches from now on. Prepared steps are discarded."""
        self.left_out, self._skipped = left_out, left_out.in_samples(self.plan.batches)
        for each in self._ready.values():
            each.cancel()
        self._ready.clear()

    def indices(self, step: int, share: int | None = None) -> np.ndarray:
        """Positions of this rank's samples in a step's global batch, int64 [A, M]: (g*R + r)*M + b for item b of
        micro-step g.

        Args:
            share: the number of a share other than this run's.
        """
        own = self.plan.batches.size(step) // self._shares
        count = own // (self.micro_batch_size * self.data_ranks)
        micro, place = np.arange(count)[:, None], np.arange(self.micro_batch_size)
        first = own * (self.share if share is None else share)
        return first + (micro * self.data_ranks + self.data_rank) * self.micro_batch_size + place

    def step(self, step: int) -> StepBatch:
        """This rank's part of a step.

        Raises:
            DataError: the files have changed during the run, are damaged, or have ids beyond the vocabulary.
        """
        if self._pool is None:
            return self.read(step)
        batch = self._ready.pop(step, None) or self._pool.submit(self.read, step)
        wanted = range(step + 1, step + 1 + self._prefetch)
        for old in [each for each in self._ready if each not in wanted]:
            self._ready.pop(old).cancel()
        for each in wanted:
            if each not in self._ready and each < self.steps:
                self._ready[each] = self._pool.submit(self.read, each)
        return batch.result()

    def ahead(self, step: int) -> StepBatch | None:
        """The batch that `step` will return, if threads prepare it. They prepare the same steps on all ranks."""
        ready = self._ready.get(step)
        return None if ready is None else ready.result()

    def read(self, step: int, share: int | None = None) -> StepBatch:
        """`step` without preparation, in the caller's thread. `share` as of `indices`."""
        indices = self.indices(step, share)
        numbers = self.plan.batches.before(step) + indices
        if self._skipped:
            numbers = np.vectorize(self._skipped.batch, otypes=[np.int64])(numbers)
        samples = [self._sample(step, int(number)) for number in numbers.flat]
        hashes = [sample_hash(int(index), sample.tokens) for index, sample in zip(indices.flat, samples)]
        batch = batch_of(step, samples, numbers, batch_hash(hashes), self.plan.masked, self.plan.columns)
        return batch if self._length is None else cut_samples(batch, self._length(step), indices)

    def _sample(self, step: int, number: int) -> Sample:
        try:
            return self.plan.sample(number)
        except DamagedTokens as error:
            raise error.read_by(step, number) from error

    def close(self) -> None:
        """Stop the threads."""
        for each in self._ready.values():
            each.cancel()
        self._ready.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def batch_of(
    step: int, samples: list[Sample], numbers: np.ndarray, hash: int, masked: bool, columns: tuple[str, ...]
) -> StepBatch:
    """The batch of these samples, whose numbers are [A, M]."""
    documents, positions = _boundaries(samples, numbers.shape)
    return StepBatch(
        step,
        torch.from_numpy(np.stack([sample.tokens for sample in samples])).reshape(*numbers.shape, -1),
        torch.from_numpy(numbers),
        hash,
        _weights(samples, numbers.shape) if masked else None,
        documents,
        positions,
        _columns(samples, columns, numbers.shape),
    )


def _weights(samples: list[Sample], shape: tuple[int, ...]) -> torch.Tensor:
    """Label weights [A, M, S]."""
    ones = np.ones(len(samples[0].tokens) - 1, np.float32)
    stacked = np.stack([ones if sample.weights is None else sample.weights for sample in samples])
    return torch.from_numpy(stacked).reshape(*shape, -1)


def _columns(samples: list[Sample], names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Further numbers of labels, [A, M, S] each. The plan has checked that samples have them."""
    stacked = {name: np.stack([sample.columns[name] for sample in samples if sample.columns]) for name in names}
    return {name: torch.from_numpy(each).reshape(*shape, -1) for name, each in stacked.items()}


def _boundaries(samples: list[Sample], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Documents and positions [A, M, S]. None without boundaries."""
    pairs = [documents_and_positions(sample.begins) for sample in samples if sample.begins is not None]
    if not pairs:
        return None, None
    documents, positions = (torch.from_numpy(np.stack(each)).reshape(*shape, -1) for each in zip(*pairs))
    return documents, positions


def build_loader(
    config: Config, *, data_rank: int, data_ranks: int, split: str = "train", name: str | None = None
) -> Loader:
    """The loader of a set for one data parallel rank. Arguments and errors as of `build_plan`."""
    scheduled = split == "train" and config.training.sequence_schedule
    loader = Loader(
        build_plan(config, split, name),
        micro_batch_size=config.training.micro_batch_size,
        data_rank=data_rank,
        data_ranks=data_ranks,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        length=(lambda step: stage_at(config, step).length) if scheduled else None,
        share=share_of(config) if split == "train" else (0, 1),
    )
    if split == "train":
        loader.leave_out(LeftOut.given(config))
    return loader


def cut_samples(batch: StepBatch, length: int, indices: np.ndarray) -> StepBatch:
    """Cut each sample into pieces of `length` tokens, which become samples. Each label stays one label.

    Piece k of sample n is sample n * pieces + k of the new batch. Its numbers, hashes, documents and positions are as
    if the batch had been read with samples of this length. `indices` are the places of the samples in the global batch,
    int64 [A, M]."""
    pieces = batch.inputs.shape[-1] // length
    if pieces == 1:
        return batch
    shape = (batch.tokens.shape[0], -1, length)

    def parts(whole: torch.Tensor | None) -> torch.Tensor | None:
        return None if whole is None else whole.reshape(shape)

    tokens = batch.tokens.unfold(-1, length + 1, length).reshape(*shape[:2], length + 1)
    numbers = (batch.sample_ids[..., None] * pieces + torch.arange(pieces)).flatten(1)
    places = indices[..., None] * pieces + np.arange(pieces)
    hashes = map(sample_hash, places.flatten().tolist(), tokens.flatten(0, 1).numpy())
    documents, positions = parts(batch.documents), parts(batch.positions)
    if documents is not None and positions is not None:
        documents = documents - documents[..., :1]
        positions = positions - positions[..., :1] * (documents == 0)
    return replace(
        batch,
        tokens=tokens,
        sample_ids=numbers,
        hash=batch_hash(hashes),
        loss_mask=parts(batch.loss_mask),
        documents=documents,
        positions=positions,
    )
