"""Files of conversations to a token file and its label file."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.file_access import keep_inputs
from megatron.config.problems import counted
from megatron.config.sections.data import TokenizerSection

from ..corpus.inputs import Input, InputChunk, read_chunks
from ..corpus.job import in_order
from ..errors import DataError
from ..manifest import ENDING, Manifest, hashed, keep_others
from ..sample import IGNORED
from ..token_file import TokenFile, TokenFileWriter, prefix_of, token_dtype, with_ending
from ..tokenizer import tokenizer_for
from .encode import ChatEncoder, ChatTemplate, ChatTreatment, arrays

EXAMPLES = 20  # bad records that are reported with their line numbers
LABELS = "_labels"  # behind the prefix of the token file
REWARDS = "_rewards.npy"


@dataclass
class ChatCounts:
    """Counts of a job's records."""

    conversations: int = 0  # conversations, tokens, trained: written, with the number of labels that count
    tokens: int = 0
    trained: int = 0
    long: int = 0  # omitted for their length
    bad: int = 0  # number of records that are no conversation. `examples` has (file, line, reason) of the first.
    examples: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class ChatJob:
    """A job. Conversations are written in the order of the inputs, and the output is the same for any number of
    workers."""

    inputs: list[Input]
    output: Path  # prefix of the token file. The label file has LABELS behind it.
    tokenizer: TokenizerSection
    template: ChatTemplate
    treatment: ChatTreatment
    workers: int = 1
    bad: str = "skip"  # "skip" or "fatal", for bad records
    overwrite: bool = False
    version: str = ""  # of this program, for the manifests

    @property
    def prefixes(self) -> tuple[Path, Path]:
        """Of the token file and of the label file."""
        prefix = prefix_of(self.output)
        return prefix, prefix.with_name(prefix.name + LABELS)


def run(job: ChatJob) -> ChatCounts:
    """Write both files and their manifests. The token file comes last: without labels it is never there.

    Raises:
        DataError: an input is missing or damaged, the output is there already, a bad record was to be fatal, or
            nothing is left to train on.
    """
    tokenizer = tokenizer_for(job.tokenizer, job.treatment.append_eod)
    _check_room(job)
    counts, (tokens, labels) = ChatCounts(), job.prefixes
    with TokenFileWriter(tokens, token_dtype(tokenizer.size)) as ids:
        with TokenFileWriter(labels, np.int32) as marks:
            settings = (job.tokenizer, job.template, job.treatment)
            rewards: list[float] = []
            for chunk, result in in_order(_chunks(job), job.workers, ChatEncoder, *settings):
                found, own, sizes = arrays(result)
                ids.extend(found, sizes)
                marks.extend(own, sizes)
                rewards += result.rewards
                counts.long += result.long
                counts.trained += int((own != IGNORED).sum())
                _count_bad(job, counts, chunk, result.bad)
            counts.conversations, counts.tokens = ids.documents, ids.tokens
            if not ids.documents:
                raise DataError(job.output, f"no conversation was found{_why(counts)}", "check --key and the inputs")
            if job.treatment.reward is not None:
                np.save(with_ending(tokens, REWARDS), np.array(rewards, np.float32))
    for prefix in (labels, tokens):
        _describe(job, prefix, tokenizer.facts, counts)
    return counts


def _chunks(job: ChatJob) -> Iterator[InputChunk]:
    for number, entry in enumerate(job.inputs):
        yield from read_chunks(number, entry, key=job.treatment.key)


def _check_room(job: ChatJob) -> None:
    """Nothing is replaced that is an input, something else, or not to be replaced."""
    written = [with_ending(prefix, ending) for prefix in job.prefixes for ending in (".bin", ".idx", ENDING)]
    if job.treatment.reward is not None:
        written.append(with_ending(job.prefixes[0], REWARDS))
    keep_inputs(written, [entry.path for entry in job.inputs if entry.path is not None])
    for prefix in job.prefixes:
        keep_others(prefix)
        if (index := with_ending(prefix, ".idx")).exists() and not job.overwrite:
            raise DataError(index, "it must not exist yet", "use another --output, or --overwrite")


def _count_bad(job: ChatJob, counts: ChatCounts, chunk: InputChunk, bad: list[tuple[int, str]]) -> None:
    name = job.inputs[chunk.input].name
    if bad and job.bad == "fatal":
        raise DataError(f"{name}:{bad[0][0]}", bad[0][1], "correct the record, or use --bad skip")
    counts.bad += len(bad)
    room = max(EXAMPLES - len(counts.examples), 0)
    counts.examples += tuple((name, line, reason) for line, reason in bad[:room])


def _why(counts: ChatCounts) -> str:
    reasons = "".join(f"\n    {name}:{line}: {reason}" for name, line, reason in counts.examples[:3])
    return f" ({counted(counts.bad, 'bad record')}, {counts.long:,} too long){reasons}"


def _describe(job: ChatJob, prefix: Path, tokenizer: dict[str, Any], counts: ChatCounts) -> None:
    file = TokenFile(prefix)
    template = {"template": job.template.name, "template_hash": job.template.hash}
    Manifest(
        tokenizer=tokenizer,
        documents=len(file),
        tokens=file.tokens,
        largest=file.extent()[1],
        dtype=file.dtype.name,
        inputs=[{"path": entry.name} for entry in job.inputs],
        options={**asdict(job.treatment), **template, "bad": counts.bad, "long": counts.long},
        version=job.version,
        **hashed(with_ending(prefix, ".bin"), with_ending(prefix, ".idx")),
    ).write(prefix)
