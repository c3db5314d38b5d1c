"""Training from texts: the token file's samples, whenever tokens become known and whoever makes them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import CheckpointError
from megatron.config import resolve
from megatron.config.arithmetic.shards import ShardError, describe_shards, list_shards
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus import job as job_module
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.files import pair_files
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.manifest import read_manifest
from megatron.data.order.order import WindowOrder
from megatron.data.plan_builder import build_plan
from megatron.data.stream import tokens as source_module
from megatron.data.stream import tokens as tokens_module
from megatron.data.stream import work
from megatron.data.stream.tokens import StreamedFile, Work, open_source
from megatron.data.stream.work import ShardInput
from megatron.data.token_file import TokenFile, with_ending
from megatron.data.tokenizer import build_tokenizer
from megatron.testing.runs import train_on_ranks
from megatron.training.start.same_run import refuse_other_shards
from tests.data.make import configuration

BYTES = {"type": "bytes"}


def write_texts(folder: Path, files: int = 4, documents: int = 40, seed: int = 0) -> Path:
    """A folder of texts in several formats, with a broken line and an empty text."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(files):
        texts = [f"{number} {each} " * int(random.integers(1, 30)) for each in range(documents)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]) + "no JSON\n"
        if number % 2:
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            (folder / f"{number}.jsonl").write_text(lines)
    (folder / "below").mkdir()
    (folder / "below" / "text.txt").write_text("one text " * 50)
    return folder


def tokenized(folder: Path, output: Path) -> TokenFile:
    """The token file of `deepy data tokenize`."""
    run(TokenizeJob(find_inputs([str(folder)]), output, TokenizerSection(**BYTES), Treatment(), version="1"))
    return TokenFile(output)


def streamed(folder: Path, cache: Path, **data: object):
    model = {"layers": "(attention/mlp) x1", "hidden_size": 16, "attention": {"heads": 2}}
    values = {"train": {"stream": str(folder)}, "order": "window", "window": 96, "cache": str(cache), **data}
    return configuration(values, tokenizer=BYTES, model={**model, "vocab_size": 257})


def settings_of(folder: Path, prefix: Path) -> dict:
    shards = describe_shards(list_shards(str(folder))[0])
    section = TokenizerSection(**BYTES).model_dump(mode="json")
    return {
        "stream": str(folder),
        "shards": shards,
        "prefix": str(prefix),
        "tokenizer": section,
        "key": "text",
        "workers": 1,
    }


def test_batches_are_the_token_files(tmp_path):
    """In a blend with a token file, on two data parallel ranks, over more than one epoch. The files are equal too."""
    folder = write_texts(tmp_path / "raw")
    tokenized(folder, tmp_path / "whole")
    other = write_texts(tmp_path / "others", files=1, seed=1)
    tokenized(other, tmp_path / "other")
    blend = [{"path": str(tmp_path / "other"), "weight": 0.3}]
    config = streamed(folder, tmp_path / "cache", train=[{"stream": str(folder), "weight": 0.7}, *blend])
    plain = [{"path": str(tmp_path / "whole"), "weight": 0.7}, *blend]
    expected = streamed(folder, tmp_path / "cache2", train=plain)
    for rank in range(2):
        loaders = [build_loader(each, data_rank=rank, data_ranks=2) for each in (config, expected)]
        for step in (0, 1, 5, 38, 39):
            mine, theirs = (loader.step(step) for loader in loaders)
            assert mine.hash == theirs.hash
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    prefix = Path(config.data.train[0].path)
    source = open_source(config.data.train[0], config)
    if source.grows:
        source.file.finish()
    for mine, theirs in zip(pair_files(prefix), pair_files(tmp_path / "whole")):
        if mine.suffix != ".json":
            assert mine.read_bytes() == theirs.read_bytes()
    mine, theirs = read_manifest(prefix), read_manifest(tmp_path / "whole")
    assert (mine.documents, mine.bin_hash, mine.inputs) == (theirs.documents, theirs.bin_hash, theirs.inputs)
    assert type(open_source(config.data.train[0], config)).__name__ == "SourceFile"  # tokenised to its end: no stream


def test_samples_while_the_file_grows(tmp_path, monkeypatch):
    """Every sample, read as soon as it can be. Each check of the progress finds some further documents."""
    folder = write_texts(tmp_path / "raw")
    whole = tokenized(folder, tmp_path / "whole")
    settings = settings_of(folder, tmp_path / "part")
    file = StreamedFile(settings, build_tokenizer(TokenizerSection(**BYTES)), 60.0)
    known, random = [0], np.random.default_rng(0)

    def grow(self: Work) -> None:
        known[0] = min(known[0] + int(random.integers(1, 9)), len(whole) - 1)
        if known[0] == len(whole) - 1:
            with monkeypatch.context() as patch:
                patch.setattr(Work, "tend", lambda self: None)
                for ending in (".bin.part", ".sizes.part", ".progress"):
                    with_ending(file.prefix, ending).unlink(missing_ok=True)
                work.tokenise(settings)
            return
        end = int(whole.offsets[known[0]])
        with_ending(file.prefix, ".bin.part").write_bytes(whole.bin_path.read_bytes()[: end + 5])
        with_ending(file.prefix, ".sizes.part").write_bytes(whole.sizes[: known[0] + 1].tobytes())
        progress = work_progress(file.key, known[0], end // whole.dtype.itemsize)
        with_ending(file.prefix, ".progress").write_text(json.dumps(progress))
        file._parts.clear()  # this test writes other files under the same names

    monkeypatch.setattr(Work, "tend", grow)
    monkeypatch.setattr(tokens_module, "POLL", 0.0)
    monkeypatch.setattr(tokens_module, "STRIDE", 8)
    orders = [WindowOrder(each, 0, 10**9 if each is file else len(each), 32, 7, 96) for each in (file, whole)]
    early = 0
    for sample in range(orders[1].length + 40):
        mine, theirs = (order.spans(sample) for order in orders)
        assert mine == theirs
        early += file.whole is None
        for span in mine:
            np.testing.assert_array_equal(file.read(*span), whole.read(*span))
    assert early > orders[1].length // 2 and orders[0].length == orders[1].length


def work_progress(key: str, documents: int, tokens: int) -> dict:
    return {"key": key, "documents": documents, "tokens": tokens}


def test_a_killed_process_is_followed_by_another(tmp_path):
    """The next one continues, with the same bytes."""
    folder = write_texts(tmp_path / "raw", documents=4000)
    whole = tokenized(folder, tmp_path / "whole")
    settings = settings_of(folder, tmp_path / "part")
    tokenizer = build_tokenizer(TokenizerSection(**BYTES))
    first = StreamedFile(settings, tokenizer, 60.0)
    first._work.tend()
    assert StreamedFile(settings, tokenizer, 60.0)._work.tend() is None  # another rank leaves it to the first
    end = time.monotonic() + 60
    while not with_ending(first.prefix, ".bin.part").exists() and first._work._process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    os.kill(first._work._process.pid, signal.SIGKILL)
    first._work._process.wait()
    with pytest.raises(DataError, match="ended with status -9"):
        first._work.tend()
    second = StreamedFile(settings, tokenizer, 60.0)
    assert second.finish().tokens == whole.tokens
    assert second.bin_path.read_bytes() == whole.bin_path.read_bytes()


def test_a_shard_that_changes_is_an_error(tmp_path):
    """Before it is read, while it is read, at the next start, and at a resume."""
    folder = write_texts(tmp_path / "raw")
    settings = settings_of(folder, tmp_path / "part")
    before = resolve_text(streamed(folder, tmp_path / "cache"))
    shards = [ShardInput.of(shard) for shard in list_shards(str(folder))[0]]
    changed = folder / "2.jsonl"
    content = changed.read_text()
    changed.write_text(content.replace("2 1 ", "2 9 "))  # of the same size
    with pytest.raises(DataError, match=r"2\.jsonl: this shard has changed"):
        run(work.job_of(settings, shards))
    assert not list(tmp_path.glob("part*"))  # no token of it stays
    with pytest.raises(DataError, match="its files have changed since the start"):
        work.tokenise(settings)
    later = streamed(folder, tmp_path / "cache")
    with pytest.raises(DataError, match="its files have changed since the start"):
        build_loader(streamed(folder, tmp_path / "cache", train={"stream": str(folder), "shards": "1 files"}),
                     data_rank=0, data_ranks=1).step(0)  # fmt: skip
    with pytest.raises(CheckpointError, match="the files of a stream have changed"):
        refuse_other_shards("x", before, later)
    changed.write_text(content)
    os.utime(changed, (1, 1))  # a copy with another time has the same state
    refuse_other_shards("x", before, streamed(folder, tmp_path / "cache"))
    tokenized(folder, Path(later.data.train[0].path))
    with pytest.raises(DataError, match="it has not the tokens of"):
        open_source(later.data.train[0], later)


def resolve_text(config) -> str:
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"))


def test_an_error_of_the_process_is_the_runs(tmp_path):
    folder = write_texts(tmp_path / "raw")
    config = streamed(folder, tmp_path / "cache", streaming={"patience": 0.2})
    source = open_source(config.data.train[0], config)
    source.file._work.tend = lambda: None  # no process ever begins
    with pytest.raises(DataError, match=r"no token was added for 0.2 seconds: 0 of 10 exist"):
        source.file.tokens_of(0, 1, 10)
    config = streamed(folder, tmp_path / "cache")
    (folder / "0.jsonl").unlink()
    with pytest.raises(DataError, match="its files have changed since the start: they were 5 files"):
        build_loader(config, data_rank=0, data_ranks=1).step(0)


def test_losses_are_the_token_files_on_any_layout(tmp_path):
    """Two ranks from the stream, stopped and resumed by one rank without its tokens, against a token file."""
    folder = write_texts(tmp_path / "raw")
    tokenized(folder, tmp_path / "whole")
    values = {
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 16, "attention": {"heads": 2}},
        "training": {"steps": 6, "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 4},
        "data": {"order": "window", "window": 96, "train": [{"stream": str(folder)}]},
        "tokenizer": BYTES,
    }
    first = {**values, "run": {"dir": str(tmp_path / "first")}}
    stop = ["training.stop_at_step=3", "checkpoint.every=3"]
    records = train_on_ranks(2, first, stop)
    for file in (tmp_path / "first" / "cache" / "streams").iterdir():
        file.unlink()
    records = train_on_ranks(1, first)
    second = {**values, "run": {"dir": str(tmp_path / "second")}}
    second["data"] = {**values["data"], "train": [{"path": str(tmp_path / "whole")}]}
    expected = train_on_ranks(1, second)
    pick = [{each["step"]: (each["loss"], each["batch_hash"]) for each in run_ if "loss" in each}
            for run_ in (records, expected)]  # fmt: skip
    assert pick[0].keys() == pick[1].keys() and len(pick[0]) == 6
    for step, (loss, digest) in pick[1].items():
        assert pick[0][step][1] == digest
        assert pick[0][step][0] == pytest.approx(loss, rel=1e-5)  # two ranks add up in another order
    alike = train_on_ranks(1, {**values, "run": {"dir": str(tmp_path / "third")}})
    assert {each["step"]: (each["loss"], each["batch_hash"]) for each in alike if "loss" in each} == pick[1]


def test_resolved_runs_name_the_state_of_the_stream(tmp_path):
    folder = write_texts(tmp_path / "raw")
    config = streamed(folder, tmp_path / "cache")
    source = config.data.train[0]
    assert source.shards.startswith("5 files, ") and source.name == "raw"
    assert resolve(config.model_dump(mode="json")).data.train[0].shards == source.shards


def test_a_stream_that_ends_between_two_phases_is_one_source(tmp_path, monkeypatch):
    """The first phase opens it as a stream, the second as a token file."""
    folder = write_texts(tmp_path / "raw", files=1)
    again = {"start": 4, "sources": [{"stream": str(folder)}]}
    config = streamed(folder, tmp_path / "cache", phases=[again])
    opened = []

    def end(section, given):
        opened.append(open_source(section, given))
        if len(opened) == 1:
            run(
                work.job_of(
                    {**opened[0].file._work.settings}, [ShardInput.of(each) for each in list_shards(str(folder))[0]]
                )
            )
        return opened[-1]

    monkeypatch.setattr(source_module, "open_source", end)
    plan = build_plan(config)
    assert [each.grows for each in opened] == [True, False] and len(plan.sources) == 1
    assert plan.phases[1].offsets == (plan.batches.before(4),)


def test_files_are_those_of_the_tokenizing_job_and_every_folder_must_be_readable(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "raw")
    for hidden in (".a/b.txt", "below/.c.txt", "below/.d/e.txt"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_text("hidden")
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere.txt")  # to no file
    (folder / "below.txt").write_text("sorted before the folder")
    expected = [str(folder / each) for each in ("0.jsonl", "1.jsonl.gz", "2.jsonl", "3.jsonl.gz", "below.txt")]
    expected += [str(folder / "below" / "text.txt")]
    assert [each.name for each in find_inputs([str(folder)])] == sorted(expected)
    assert [each.path for each in list_shards(str(folder))[0]] == sorted(expected)
    scan = os.scandir

    def refused(path):
        if str(path).endswith("below"):
            raise PermissionError(f"{path} is closed")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ShardError, match="must be readable: .* is closed"):
        list_shards(str(folder))
    with pytest.raises(DataError, match="cannot be listed .* is closed"):
        find_inputs([str(folder)])


def test_streams_of_one_name_keep_their_states(tmp_path):
    folders = [write_texts(tmp_path / part / "raw", files=1, seed=seed) for seed, part in enumerate("ab")]
    train = [{"stream": str(each), "path": str(tmp_path / each.parent.name)} for each in folders]
    before = streamed(folders[0], tmp_path / "cache", train=train)
    assert len({each.name for each in before.data.train}) == 1
    refuse_other_shards("x", resolve_text(before), before)
    (folders[0] / "0.jsonl").unlink()
    with pytest.raises(CheckpointError, match="the files of a stream have changed"):
        refuse_other_shards("x", resolve_text(before), streamed(folders[0], tmp_path / "cache", train=train))


def test_another_encoder_takes_over_when_it_is_checked(tmp_path, monkeypatch):
    """The texts before are encoded by the tokenizer's own, the others by the one that was checked meanwhile."""
    folder = write_texts(tmp_path / "raw")
    whole = tokenized(folder, tmp_path / "whole")
    shards = [ShardInput.of(shard) for shard in list_shards(str(folder))[0]]
    choose, encode, used = job_module.choose_encoder, job_module.in_order, []

    def chosen(tokenizer, requested="auto", share=None):
        return replace(choose(tokenizer, "tokenizer"), reason=requested)

    def in_order(chunks, workers, make, section, choice, *others):
        for each in encode(chunks, workers, make, section, choice, *others):
            used.append(choice.reason)
            yield each

    monkeypatch.setattr(job_module, "LITTLE", 0)
    monkeypatch.setattr(job_module, "choose_encoder", chosen)
    monkeypatch.setattr(job_module, "in_order", in_order)
    found = run(work.job_of(settings_of(folder, tmp_path / "part"), shards))
    assert used[0] == "tokenizer" and used[-1] == "auto" == found.choice.reason and len(used) == 5
    assert (tmp_path / "part.bin").read_bytes() == whole.bin_path.read_bytes()
