"""From a step of a run back to the bytes of the corpus, and from a document to the steps that saw it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from megatron.config import load, save_resolved
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs, open_stream
from megatron.data.corpus.job import TokenizeJob
from megatron.data.corpus.job import run as tokenize
from megatron.data.errors import DataError
from megatron.data.hashing import MODULUS, sample_hash
from megatron.data.loader import build_loader
from megatron.data.manifest import DamagedTokens
from megatron.data.provenance import Provenance, TextPiece, run_config, step_hash
from megatron.data.text_search import find_text
from megatron.data.token_file import TokenFile
from megatron.data.tokenizer import build_tokenizer
from tests.paths import ROOT
from tests.scripts import script

CONFIG = """
model: {layers: "(attention/mlp) x1", hidden_size: 16, vocab_size: 257, attention: {heads: 2}}
training: {steps: 25, sequence_length: 48, global_batch_size: 12, micro_batch_size: 2, sequence_schedule: STAGES}
tokenizer: {type: bytes}
data:
  train: [{path: PATH/a, weight: 0.75}, {path: PATH/b, weight: 0.25}]
  validation: {small: PATH/b}
  order: ORDER
run: {dir: PATH/run}
"""


@pytest.fixture(scope="module", params=["pythia", "stream", "stream, in stages"])
def run(request, tmp_path_factory):
    """Two corpora (one compressed) tokenized, and the resolved configuration of a run on 3 ranks."""
    import gzip

    folder = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(4)
    for name, count in (("a", 150), ("b", 40)):
        records = [
            json.dumps(
                {"id": number, "text": f"{name}{number}: " + "äx yz"[: 1 + number % 5] * int(random.integers(1, 40))},
                ensure_ascii=False,
            )
            for number in range(count)
        ]
        content = ("\n".join(records) + "\n").encode()
        path = folder / (f"{name}.jsonl" if name == "a" else f"{name}.jsonl.gz")
        path.write_bytes(content if name == "a" else gzip.compress(content))
        tokenize(TokenizeJob(find_inputs([str(path)]), folder / name, TokenizerSection(type="bytes"), Treatment()))
    order, _, stages = request.param.partition(", ")
    stages = "[{until: 6, sequence_length: 16}, {until: 20, sequence_length: 24}]" if stages else "[]"
    (folder / "run.yml").write_text(
        CONFIG.replace("PATH", str(folder)).replace("ORDER", order).replace("STAGES", stages)
    )
    save_resolved(load([folder / "run.yml"], ranks=3), folder / "run" / "config.yml")
    return folder


def record_of(piece: TextPiece) -> bytes:
    """The bytes of the record that a piece was made from, out of the (uncompressed) input."""
    with open_stream(piece.input) as (stream, _):
        stream.read(piece.input_start)
        return stream.read(piece.input_length)


def test_a_step_traced_to_the_very_bytes(run):
    """The pieces' documents, encoded again from the bytes of the inputs, give every token that the loader hands out."""
    provenance = Provenance(run_config(run / "run"))
    tokenizer = build_tokenizer(provenance.config.tokenizer)
    loaders = [build_loader(provenance.config, data_rank=rank, data_ranks=3) for rank in range(3)]
    sources, lengths = set(), set()
    for step in (0, 7, 24):
        batches = [loader.step(step) for loader in loaders]
        rows = {
            number: (tokens, rank)
            for rank, batch in enumerate(batches)
            for number, tokens in zip(batch.sample_ids.flatten().tolist(), batch.tokens.flatten(0, 1).tolist())
        }
        sequences = provenance.step(step)
        size = sum(len(batch.sample_ids.flatten()) for batch in batches)
        assert [each.number for each in sequences] == list(range(step * size, step * size + size))
        lengths.add(len(sequences[0].tokens) - 1)
        for each in sequences:
            built = []
            for piece in each.pieces:
                record = json.loads(record_of(piece))
                assert record["id"] == piece.document and piece.unit == "bytes"
                built += [*tokenizer.encode(record["text"]), tokenizer.eod_id][piece.start : piece.start + piece.length]
                sources.add(piece.source)
            assert (built, each.rank) == rows[each.number]
        assert step_hash(sequences) == sum(batch.hash for batch in batches) % MODULUS
        for rank in range(3):
            assert step_hash(provenance.step(step, rank)) == batches[rank].hash
            assert [each.number for each in provenance.step(step, rank)] == batches[rank].sample_ids.flatten().tolist()
    assert sources == {"a", "b"}
    assert lengths == ({16, 24, 48} if provenance.config.training.sequence_schedule else {48})


def test_the_hash_by_the_documentation(run):
    """The formula as docs/data.md prints it gives the tool's number, from the tokens that the tool shows."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?def step_hash.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code, names)
    done = tool("batch.py", str(run / "run"), "--step", "7", "--tokens", "--json")
    step = json.loads(done.stdout)["steps"][0]
    samples = [each["tokens"] for each in step["sequences"]]
    assert f"{names['step_hash'](samples):016x}" == step["hash"]


def test_where_against_looking_everywhere(run):
    provenance = Provenance(run_config(run / "run"))
    everything = [(step, each) for step in range(25) for each in provenance.step(step)]
    for source, name in enumerate("ab"):
        for document in range(0, 40, 3):
            seen = [
                (step, each.index)
                for step, each in everything
                if any(piece.source == name and piece.document == document for piece in each.pieces)
            ]
            assert provenance.seen(source, document) == seen
            part = [
                (step, each.index)
                for step, each in everything
                if any(
                    piece.source == name
                    and piece.document == document
                    and piece.start < 6
                    and piece.start + piece.length > 4
                    for piece in each.pieces
                )
            ]
            assert provenance.seen(source, document, 4, 2) == part


def test_texts_are_found(run):
    tokenizer = build_tokenizer(TokenizerSection(type="bytes"))
    for name, text, documents in (("a", "a17: ", [17]), ("b", "b3", [3, *range(30, 40)]), ("a", "nowhere", [])):
        file = TokenFile(run / name)
        found = list(find_text(file, tokenizer, text))
        assert [document for document, _, _ in found] == documents
        for document, start, length in found:
            assert tokenizer.decode(file.read(document, start, length).tolist()) == text


def tool(name: str, *arguments: str) -> CompletedProcess:
    return script(f"data/{name}", *arguments)


def test_tools(run, tmp_path):
    done = tool("batch.py", str(run / "run"), "--step", "7", "--text", "--json", "--export", str(tmp_path / "x.npy"))
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["steps"][0]
    tokenizer = build_tokenizer(TokenizerSection(type="bytes"))
    array = np.load(tmp_path / "x.npy")
    schedule = run_config(run / "run").training.sequence_schedule
    assert array.shape == ((1, 24, 25) if schedule else (1, 12, 49))
    if schedule:
        done = tool("batch.py", str(run / "run"), "--step", "4", "--to", "7", "--export", str(tmp_path / "y.npy"))
        assert done.returncode == 2 and "sequences of several lengths" in done.stderr
    assert [each["text"] for each in step["sequences"]] == [tokenizer.decode(row.tolist()) for row in array[0]]
    assert int(step["hash"], 16) == sum(sample_hash(index, row) for index, row in enumerate(array[0])) % MODULUS
    piece = step["sequences"][0]["pieces"][0]
    done = tool("where.py", str(run / "run"), "--document", f"{piece['source']}:{piece['document']}", "--json")
    assert {"step": 7, "index": 0} in json.loads(done.stdout)["places"][0]["seen"]
    done = tool("where.py", str(run / "run"), "--text", "a17: ")
    assert done.returncode == 0 and "a document 17 tokens 0-4: " in done.stdout
    done = tool(
        "inspect.py",
        str(run / "a"),
        "--samples",
        "2",
        "--tokenizer-type",
        "bytes",
        "--verify",
        "--picture",
        str(tmp_path / "p.png"),
    )
    assert "150 documents" in done.stdout and "no problems found" in done.stdout and "a0: " in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    done = tool("batch.py", str(run / "run"), "--step", "0", "--split", "validation", "--rank", "1", "--json")
    assert all(each["rank"] == 1 for each in json.loads(done.stdout)["steps"][0]["sequences"])


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("batch.py", ["RUN", "--step", "25"], "there is no step 25"),
        ("batch.py", ["RUN", "--step", "0", "--rank", "3"], "no data parallel rank 3"),
        ("batch.py", ["nowhere", "--step", "0"], "no resolved configuration"),
        ("where.py", ["RUN", "--document", "c:1"], "are called 'c'"),
        ("where.py", ["RUN", "--document", "a:1000"], "has documents 0 ... 149"),
        ("where.py", ["RUN", "--document", "a"], "is not SOURCE:NUMBER"),
        ("inspect.py", ["nowhere"], "does not exist"),
        ("tokenize.py", ["--output", "x"], "nothing to read"),
        ("merge.py", ["--input", "nowhere", "--output", "x"], "does not exist"),
        ("split.py", ["nowhere", "--shares", "a", "--output", "x"], "NAME=SHARE"),
        ("prepare.py", ["nope"], "not known"),
        ("train_tokenizer.py", ["--input", "nowhere", "--output", "nowhere.json"], "no such file"),
    ],
)
def test_mistakes_end_with_status_2(run, name, arguments, message):
    done = tool(name, *(str(run / "run") if each == "RUN" else each for each in arguments), "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr


def test_changed_data_do_not_pass_unseen(run):
    """A token file that changed after the run is refused. Without checksums it gives another hash. Another file's table
    of origins is refused."""
    config = run_config(run / "run")
    sequences = Provenance(config).step(3)
    piece = next(piece for each in sequences for piece in each.pieces if piece.source == "a")
    path = run / "a.bin"
    content = bytearray(path.read_bytes())
    place = int(TokenFile(path).offsets[piece.document]) + 2 * piece.start
    manifest = run / "a.json"
    known = manifest.read_text()
    try:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedTokens, match="is not what was written"):
            Provenance(config).step(3)
        manifest.write_text(json.dumps({**json.loads(known), "blocks": None}))
        assert step_hash(Provenance(config).step(3)) != step_hash(sequences)
    finally:
        path.write_bytes(content)
        manifest.write_text(known)
    assert step_hash(Provenance(config).step(3)) == step_hash(sequences)
    origin = run / "a.origin"
    table = origin.read_bytes()
    try:
        origin.write_bytes(table[:-20])
        with pytest.raises(DataError, match="table of origins has 149 documents"):
            Provenance(config).step(0)
    finally:
        origin.write_bytes(table)


def test_inspect_finds_problems(run, tmp_path):
    from megatron.data.corpus.files import examine_file

    for ending in (".bin", ".idx", ".json", ".origin"):
        (tmp_path / f"a{ending}").write_bytes(Path(f"{run / 'a'}{ending}").read_bytes())
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[1] = 5
    (tmp_path / "a.bin").write_bytes(content)
    problems = examine_file(tmp_path / "a", verify=True)["problems"]
    assert any("SHA-256 differs" in each for each in problems) and any(
        "its tokenizer has 257 ids" in each for each in problems
    )
    done = tool("inspect.py", str(tmp_path / "a"), "--verify", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["problems"] == problems
