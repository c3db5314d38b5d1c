"""Read texts: jsonl (plain, .gz, .zst, .xz, in .tar), JSON arrays, parquet, arrow, text files, lm_dataformat's .dat.

An input is read as chunks in a fixed order. A chunk is raw data, which workers parse, and has its position, so reading
can resume at the end of any chunk."""

import bz2
import contextlib
import glob
import gzip
import io
import lzma
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from ...config.arithmetic.shards import KNOWN, ending_of, files_below, is_url, kind_of
from ...config.file_access import parse_json
from ...config.problems import counted
from ..errors import DataError

Bytes = IO[bytes] | io.BufferedIOBase  # decompressing files are only the latter
BLOCK = 1 << 20  # bytes of a chunk of lines
LONGEST = 1 << 28  # bytes of a line or a text. A compressed file of a few MB may contain one that fills the memory
LARGEST = 1 << 31  # bytes of a whole JSON array
ROWS = 1024  # rows of a chunk of a table
NEWLINE = b"\n"
MEMBER = "::"  # between a tar archive and the name of its member


@dataclass(frozen=True)
class Input:
    """One input."""

    name: str  # a path, `archive.tar::member`, or the name of a data set
    kind: str  # "lines", "array", "table", "text", "dat" or "dataset"
    options: dict[str, Any] = field(default_factory=dict)  # of a data set, for `datasets.load_dataset`

    @property
    def unit(self) -> str:
        """Unit of its positions: "bytes" of the uncompressed content, or "rows"."""
        return "rows" if self.kind in ("array", "table", "dataset") else "bytes"

    @property
    def path(self) -> Path | None:
        """The local file that is read, or None."""
        return None if self.kind == "dataset" or is_url(self.name) else Path(self.name.split(MEMBER)[0])

    def state(self) -> list:
        """Values that change with the input."""
        if self.path is None:
            return [self.name, self.kind, sorted(map(str, self.options.items()))]
        status = self.path.stat()
        return [self.name, self.kind, status.st_size, status.st_mtime_ns]

    def check(self, inside: bool = False) -> None:
        """Refuse an input that has changed since the job began. Only the shards of a stream are compared.

        Args:
            inside: between two chunks of it.
        """

    def open(self) -> BinaryIO | None:
        """The open file of a shard in a store. None for a local file."""
        return None


@dataclass(frozen=True)
class InputChunk:
    """A part of an input."""

    input: int  # the input's number
    kind: str
    start: int  # start, end: position, in the input's unit
    end: int
    line: int  # number of its first line or row, from 1
    content: bytes | list  # bytes of whole lines or of a whole file, or a list of texts
    compressed: int = 0  # bytes of the input's file read so far (for progress), 0 if unknown


def find_inputs(patterns: list[str], kind: str | None = None, skipped: list[str] | None = None) -> list[Input]:
    """The inputs that paths, folders and globs name, in sorted order within each. Tar archives give their members.

    Hidden files and folders of a folder are skipped.

    Args:
        kind: of all files. Default: by each file's ending.
        skipped: receives the names of files and members with an unknown ending in folders and archives.

    Raises:
        DataError: something does not exist, a named file has an unknown ending, or there is nothing to read.
    """
    found: list[Input] = []
    unknown: list[str] = []
    inside = skipped if skipped is not None else []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            try:
                files = files_below(path)
            except OSError as error:
                raise DataError(path, f"it cannot be listed ({error})", "check its folders' permissions") from error
        else:
            files = [pattern] if path.is_file() else sorted(glob.glob(pattern, recursive=True))
        if not files:
            raise DataError(pattern, "there is no such file", "check the path, or quote the glob")
        for file in files:
            members = _members(file) if file.lower().endswith(".tar") else [file]
            named = members == [file] and not path.is_dir()
            for name in members:
                if known := kind or kind_of(name):
                    found.append(Input(name, known))
                else:
                    (unknown if named else inside).append(name)
    if unknown or (inside and not found):
        raise DataError(
            ", ".join([*(unknown or inside)[:10], *(["..."] if len(unknown or inside) > 10 else [])]),
            "the ending must say what is inside",
            f"rename to end in {', '.join(KNOWN)}, or give --format",
        )
    return found


def _members(file: str) -> list[str]:
    try:
        with tarfile.open(file, "r:") as archive:
            return [f"{file}{MEMBER}{member.name}" for member in archive if member.isfile()]
    except tarfile.TarError as error:
        raise DataError(file, f"it is no tar archive ({error})", "give an intact .tar") from error


def skipped_files(names: list[str]) -> str:
    """A sentence about skipped files, by their endings or, for a few, by name."""
    endings = Counter(ending_of(name)[0] or "no ending" for name in names)
    kinds = ", ".join(f"{number:,} with {ending}" for ending, number in endings.most_common(8))
    which = ", ".join(repr(name)[1:-1] for name in names) if len(names) <= 3 else kinds
    return f"skipped {counted(len(names), 'file')} whose ending does not say the format: {which} (--format reads it)"


@contextlib.contextmanager
def open_stream(name: str, opened: BinaryIO | None = None) -> Iterator[tuple[Bytes, BinaryIO]]:
    """The uncompressed content of a file or of an archive's member, and the raw file below it."""
    path, _, member = name.partition(MEMBER)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(opened or open(path, "rb"))
        outer: IO[bytes] = raw
        if member:
            archive = stack.enter_context(tarfile.open(fileobj=raw, mode="r:"))
            found = archive.extractfile(member)
            if found is None:
                raise DataError(name, "this member of the archive is no file", "name another")
            outer = found
        _, compression = ending_of(member or path)
        yield _decompressed(outer, compression, stack), raw


def _decompressed(file: IO[bytes], compression: str, stack: contextlib.ExitStack) -> Bytes:
    if compression == ".gz":
        return stack.enter_context(gzip.open(file))
    if compression == ".xz":
        return stack.enter_context(lzma.open(file))
    if compression == ".bz2":
        return stack.enter_context(bz2.open(file))
    if compression == ".zst":
        import zstandard

        reader = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(file, read_across_frames=True)
        return stack.enter_context(io.BufferedReader(reader, 1 << 17))
    return file


def read_chunks(number: int, entry: Input, position: int = 0, line: int = 1, key: str = "text") -> Iterator[InputChunk]:
    """The chunks of input `number` from a position (and its line or row) that was the end of a chunk.

    Args:
        key: column of the text in tables.

    Raises:
        DataError: the input is damaged or has no such column.
    """
    reader = {"lines": _lines, "array": _array, "table": _table, "text": _text, "dat": _dat, "dataset": _dataset}[
        entry.kind
    ]
    try:
        yield from reader(number, entry, position, line, key)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise DataError(entry.name, f"it cannot be read to its end ({error})", "fetch it again") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("zstandard", "zstd", "pyarrow", "zlib"):
            raise DataError(entry.name, f"it cannot be read to its end ({error})", "fetch it again") from error
        raise


def _skip(stream: Bytes, position: int) -> None:
    """Skip to a position. Compressed streams are read up to it."""
    while position > 0:
        part = stream.read(min(position, BLOCK))
        if not part:
            raise EOFError("it is shorter than it was")
        position -= len(part)


def _bounded(entry: Input, content: bytes, most: int, what: str) -> bytes:
    """The content, if it has at most `most` bytes."""
    if len(content) > most:
        rule = f"{what} has more than {most >> 20} MiB once it is decompressed"
        raise DataError(entry.name, rule, "split it into documents, one on each line of a .jsonl file")
    return content


def _lines(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    with open_stream(entry.name, entry.open()) as (stream, raw):
        if stream is raw:
            stream.seek(position)
        else:
            _skip(stream, position)
        while block := stream.read(BLOCK):
            if not block.endswith(b"\n"):
                block += _bounded(entry, stream.readline(LONGEST + 1), LONGEST, f"line {line + block.count(NEWLINE)}")
            yield InputChunk(number, entry.kind, position, position + len(block), line, block, raw.tell())
            position, line = position + len(block), line + block.count(b"\n")


def _text(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    if position:
        return
    with open_stream(entry.name, entry.open()) as (stream, raw):
        content = _bounded(entry, stream.read(LONGEST + 1), LONGEST, "a text")
        yield InputChunk(number, entry.kind, 0, max(len(content), 1), 1, content, raw.tell())


def _dat(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    """lm_dataformat's .dat: each text after its length in 8 bytes, the most significant first."""
    with open_stream(entry.name, entry.open()) as (stream, raw):
        _skip(stream, position)
        while head := stream.read(8):
            length = int.from_bytes(head, "big")
            if len(head) < 8 or length == 0:
                return
            content = _bounded(entry, stream.read(min(length, LONGEST + 1)), LONGEST, f"text {line}")
            if len(content) < length:
                raise EOFError("the last text is cut off")
            yield InputChunk(number, entry.kind, position, position + 8 + length, line, content, raw.tell())
            position, line = position + 8 + length, line + 1


def _rows(number: int, entry: Input, start: int, texts: list, compressed: int = 0) -> InputChunk:
    return InputChunk(number, entry.kind, start, start + len(texts), start + 1, texts, compressed)


def _array(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    with open_stream(entry.name, entry.open()) as (stream, _):
        try:
            values = parse_json(_bounded(entry, stream.read(LARGEST + 1), LARGEST, "a JSON array"))
        except ValueError as error:
            raise DataError(entry.name, f"it is no JSON ({error})", "JSON lines end in .jsonl") from error
    if not isinstance(values, list):
        values = [values]  # one record: one text, or some program's settings, which count as bad
    texts = [value.get(key) if isinstance(value, dict) else value for value in values]
    for start in range(position, len(texts), ROWS):
        yield _rows(number, entry, start, texts[start : start + ROWS])


def _table(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    begin = 0
    for batch in _batches(entry, key):
        column = batch.column(0).to_pylist()
        for start in range(0, len(column), ROWS):
            part = column[start : start + ROWS]
            if begin + start >= position:
                yield _rows(number, entry, begin + start, part)
        begin += len(column)


def _batches(entry: Input, key: str) -> Iterator[Any]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    def check(schema: Any) -> None:
        if key not in schema.names:
            raise DataError(entry.name, f"it has no column {key!r}", f"give --key, one of {', '.join(schema.names)}")

    if entry.name.lower().endswith(".parquet"):
        with parquet.ParquetFile(entry.open() or entry.name) as table:
            check(table.schema_arrow)
            yield from table.iter_batches(batch_size=ROWS, columns=[key])
        return
    opened = entry.open()
    with arrow.PythonFile(opened, mode="r") if opened else arrow.memory_map(entry.name) as source:
        try:
            reader = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:  # the file format has an index at its end, the stream format has not
            indexed = arrow.ipc.open_file(source)
            check(indexed.schema)
            yield from (indexed.get_batch(index).select([key]) for index in range(indexed.num_record_batches))
            return
        check(reader.schema)
        yield from (batch.select([key]) for batch in reader)


def _dataset(number: int, entry: Input, position: int, line: int, key: str) -> Iterator[InputChunk]:
    """A data set that the `datasets` library loads, from the hub or from files, streaming or not."""
    import datasets

    try:
        rows = datasets.load_dataset(entry.name, **entry.options)
    except (OSError, ValueError, ConnectionError) as error:
        raise DataError(entry.name, f"datasets cannot load it ({error})", "check name, --config and --split") from error
    texts: list = []
    start = position
    for row in rows.skip(position) if position else rows:
        if key not in row:
            raise DataError(entry.name, f"its rows have no column {key!r}", f"give --key, one of {', '.join(row)}")
        texts.append(row[key])
        if len(texts) == ROWS:
            yield _rows(number, entry, start, texts)
            start, texts = start + ROWS, []
    if texts:
        yield _rows(number, entry, start, texts)
