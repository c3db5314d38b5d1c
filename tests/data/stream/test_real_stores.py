"""Streams and curation over the protocols of S3, of Google's store and of the hub, by their own clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from megatron.config.arithmetic.shards import describe_shards, list_shards  # noqa: E402
from megatron.config.sections.data import TokenizerSection  # noqa: E402
from megatron.data.corpus.encode import Treatment  # noqa: E402
from megatron.data.corpus.inputs import find_inputs  # noqa: E402
from megatron.data.corpus.job import TokenizeJob, run  # noqa: E402
from megatron.data.errors import DataError  # noqa: E402
from megatron.data.loader import build_loader  # noqa: E402
from megatron.data.stream import work  # noqa: E402
from tests.data.stream.real_stores import STORES, RealStore, opened  # noqa: E402
from tests.data.stream.test_streams import streamed  # noqa: E402


@pytest.fixture(params=STORES)
def real_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealStore]:
    with opened(request.param, monkeypatch) as store:
        yield store


def write_files(folder: Path) -> dict[str, bytes]:
    """Texts in jsonl, zst and parquet, in a folder and by their names."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet
    import zstandard

    folder.mkdir()
    lines = "".join(json.dumps({"text": f"text {each} of a line {each * 7919}"}) + "\n" for each in range(2000))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines.replace('"text ', '"TEXT ').encode()))
    parquet.write_table(arrow.table({"text": [f"row {each}" for each in range(2000)]}), folder / "c.parquet")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def settings_of(url: str, prefix: Path) -> dict[str, Any]:
    tokenizer = TokenizerSection(type="bytes").model_dump(mode="json")
    shards = describe_shards(list_shards(url)[0])
    return {"stream": url, "shards": shards, "prefix": str(prefix), "tokenizer": tokenizer, "key": "text", "workers": 1}


@pytest.mark.tour
def test_a_run_reads_the_token_files_batches_from_a_store(real_store: RealStore, tmp_path: Path, monkeypatch: Any):
    """Through errors, cut connections and silence, after a kill, until a shard changes."""
    for name, content in write_files(tmp_path / "raw").items():
        real_store.put(name, content)
    section = TokenizerSection(type="bytes")
    run(TokenizeJob(find_inputs([str(tmp_path / "raw")]), tmp_path / "whole", section, Treatment(), version="1"))
    monkeypatch.setattr(work, "WAITS", (0.0,) * 6)
    monkeypatch.setattr(work, "BUFFER", 1 << 13)
    monkeypatch.setattr("fsspec.spec.AbstractBufferedFile.DEFAULT_BLOCK_SIZE", 1 << 16)
    settings = settings_of(real_store.url, tmp_path / "part")
    real_store.faults.on = True
    work.tokenise(settings)
    real_store.faults.on = False
    for ending in (".bin", ".idx", ".origin"):
        assert (tmp_path / f"part{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    assert real_store.faults.found == {"error", "cut", "silence"}

    config = streamed(tmp_path / "raw", tmp_path / "cache", train={"stream": real_store.url})
    plain = streamed(tmp_path / "raw", tmp_path / "cache2", train={"path": str(tmp_path / "whole")})
    expected = build_loader(plain, data_rank=0, data_ranks=1)
    first = build_loader(config, data_rank=0, data_ranks=1)
    assert [first.step(each).hash for each in range(3)] == [expected.step(each).hash for each in range(3)]
    if (process := first.plan.sources[0].file._work._process) is not None:
        os.kill(process.pid, signal.SIGKILL)
    first.close()
    again = build_loader(config, data_rank=0, data_ranks=1)
    assert [again.step(each).hash for each in range(3, 40)] == [expected.step(each).hash for each in range(3, 40)]

    settings = settings_of(real_store.url, tmp_path / "other")
    shards = [work.ShardInput.of(shard) for shard in list_shards(real_store.url)[0]]
    real_store.put("b.jsonl.zst", (tmp_path / "raw" / "b.jsonl.zst").read_bytes()[::-1])
    with pytest.raises(DataError, match=r"b\.jsonl\.zst: this shard has changed"):
        run(work.job_of(settings, shards))
    assert not list(tmp_path.glob("other*"))


@pytest.mark.tour
def test_a_recipe_reads_and_writes_a_store(real_store: RealStore, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    from tests.curation.recipes import curate, tree

    stages = [{"keep": {"signals": {"rps_doc_word_count": [2, 100]}}}, {"exact": {"by": "normalised"}}, {"pii": {}}]
    for name, content in write_files(tmp_path / "raw").items():
        real_store.put(name, content)
    curate(tmp_path, stages, [{"name": "texts", "path": str(tmp_path / "raw")}], shard_bytes=1)
    shutil.move(tmp_path / "out", tmp_path / "local")
    output = f"{real_store.url}_out" if real_store.writable else str(tmp_path / "out")
    source = {"name": "texts", "path": real_store.url}
    report = curate(tmp_path, stages, [source], shard_bytes=1, output=output)
    assert report["kept"] == {"texts": 4000}
    if real_store.writable:
        system, place = fsspec.core.url_to_fs(output)
        system.invalidate_cache()
        system.get(place, str(tmp_path / "out"), recursive=True)
    apart = {"inputs.json", "report.json", "state.json"}  # which have the addresses of the input
    found, expected = ({n: h for n, h in tree(tmp_path / each).items() if n not in apart} for each in ("out", "local"))
    assert found == expected
