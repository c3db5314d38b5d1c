"""Documents of an input file. Whatever cannot be a document is quarantined with a reason, and nothing ends the run."""

import bz2
import gzip
import io
import lzma
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import zstandard
from datatrove.data import Document

from megatron.config.file_access import parse_json

from .recipe import LimitsSection, SourceSection
from .shards import InputFile

BLOCK = 1 << 20  # bytes that are read at once
FREE = 1 << 26  # bytes that a compressed file may expand to before its factor counts
EXCERPT = 200  # bytes of a broken record that are kept
ROWS = 64  # of a table that are read at once
UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Quarantined:
    """Input that is no document."""

    source: str  # source, file: where it is
    file: str
    record: int  # number of the line, row or record, from 1. 0: the rest of the file, or all of it.
    reason: str  # why
    excerpt: str = ""  # its first bytes, printable

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "file": self.file, "record": self.record, "reason": self.reason} | (
            {"excerpt": self.excerpt} if self.excerpt else {}
        )


class Broken(Exception):
    """The rest of a file cannot be read. The message is the reason."""


class StoreError(RuntimeError):
    """A store gave no answer. That says nothing about the file: the task fails, and is started again."""


class _Readable(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self.read(len(buffer)) or b""
        buffer[: len(part)] = part
        return len(part)


class _Remote(_Readable):
    """A file of a store. A failure to read it says nothing about its content."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file: Any = self._try(lambda: fsspec.open(url, "rb").open())

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # each store has its own
            raise StoreError(f"{self._url}: {error}") from error

    def read(self, size: int = -1) -> bytes:
        return bytes(self._try(lambda: self._file.read(size)))

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self._try(lambda: self._file.seek(place, whence)))

    def tell(self) -> int:
        return int(self._file.tell())

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _opened(file: InputFile) -> Any:
    return fsspec.open(file.url, "rb") if file.url.startswith("file://") else _Remote(file.url)


def documents(file: InputFile, source: SourceSection, limits: LimitsSection) -> Iterator[Document | Quarantined]:
    """Documents of a file, in its order, and what is quarantined.

    The id is `source/name` with `:number` for the record, counted from 1 with the broken ones."""
    if file.problem:
        yield Quarantined(file.source, file.name, 0, file.problem)
        return
    readers = {"jsonl": _jsonl, "parquet": _parquet, "warc": _warc, "text": _text}
    try:
        for number, record in readers[file.format](file, source, limits):
            yield _document(file, number, record)
    except Broken as error:
        yield Quarantined(file.source, file.name, 0, str(error))
    except StoreError:
        raise
    except Exception as error:  # each library has its own
        reason = f"the file cannot be read to its end ({type(error).__name__})"
        yield Quarantined(file.source, file.name, 0, reason, _excerpt(str(error).encode("utf-8", "replace")))


Record = tuple[str, dict[str, Any]] | tuple[None, str, bytes]  # text and metadata, or a reason and an excerpt


def _document(file: InputFile, number: int, record: Record) -> Document | Quarantined:
    if record[0] is None:
        return Quarantined(file.source, file.name, number, record[1], _excerpt(record[2]))
    text, metadata = record[0], record[1]
    try:
        f"{text}{metadata}".encode()
    except UnicodeEncodeError:
        return Quarantined(file.source, file.name, number, "the text has half of a surrogate pair")
    if not text.strip():
        return Quarantined(file.source, file.name, number, "the text is empty")
    if "\0" in text:
        return Quarantined(file.source, file.name, number, "the text has NUL characters")
    name = f"{file.source}/{file.name}" + (f":{number}" if number else "")
    return Document(text=text, id=name, metadata={"source": file.source, **({"record": metadata} if metadata else {})})


def _excerpt(content: bytes) -> str:
    return content[:EXCERPT].decode("utf-8", "backslashreplace")


class _Bounded(_Readable):
    """A decompressed stream that ends with an error where the file has expanded by more than a factor."""

    def __init__(self, stream: Any, size: int, factor: int) -> None:
        self._stream, self._most = stream, max(FREE, size * factor)
        self._factor, self._count = factor, 0

    def read(self, size: int = -1) -> bytes:
        try:
            part = bytes(self._stream.read(BLOCK if size < 0 else min(size, BLOCK)))
        except EOFError as error:  # which some readers take for the end
            raise Broken("the file cannot be read to its end (EOFError)") from error
        self._count += len(part)
        if self._count > self._most:
            raise Broken(f"the file expands by more than a factor of {self._factor}")
        return part


class _Zstandard(_Readable):
    """The content of zstandard frames. zstandard's own reader takes a file that is cut off for a whole one."""

    PIECE = 2048  # bytes that are unpacked at once, to 64 MiB at most: the format allows a factor of 32,768

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._ready, self._rest = raw, io.BytesIO(), b""
        self._frame: Any = None  # that has begun and not ended

    def read(self, size: int = -1) -> bytes:
        while not (part := self._ready.read(size)):
            piece = self._rest or self._raw.read(self.PIECE)
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return b""
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = io.BytesIO(self._frame.decompress(piece))
            self._rest, self._frame = (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
        return part


def open_input(file: InputFile, limits: LimitsSection, raw: IO[bytes]) -> Any:
    """The uncompressed content of an opened file."""
    name = file.name.lower()
    if name.endswith(".gz"):
        stream: Any = gzip.GzipFile(fileobj=raw)
    elif name.endswith(".zst"):
        stream = _Zstandard(raw)
    elif name.endswith(".bz2"):
        stream = bz2.BZ2File(raw)
    elif name.endswith(".xz"):
        stream = lzma.LZMAFile(raw)
    else:
        return raw
    return _Bounded(stream, file.size, limits.expansion)


def _lines(stream: Any, most: int) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Numbers and lines of a stream. A line that is too long is None, with its beginning, and is never held whole."""
    number, parts, held, beginning = 1, list[bytes](), 0, b""
    while block := stream.read(BLOCK):
        pieces = block.split(b"\n")
        for place, piece in enumerate(pieces):
            beginning = beginning or piece[:EXCERPT]
            held += len(piece)
            if held <= most:
                parts.append(piece)
            else:
                parts = []
            if place < len(pieces) - 1:
                yield number, b"".join(parts) if held <= most else None, beginning
                number, parts, held, beginning = number + 1, [], 0, b""
    if held:
        yield number, b"".join(parts) if held <= most else None, beginning


def _jsonl(file: InputFile, source: SourceSection, limits: LimitsSection) -> Iterator[tuple[int, Record]]:
    with _opened(file) as raw:
        for number, line, beginning in _lines(open_input(file, limits, raw), limits.document):
            if number == 1 and beginning.startswith(UTF16):
                raise Broken("the file is UTF-16, and must be UTF-8")
            if line is None:
                yield number, (None, f"the record has more than {limits.document} bytes", beginning)
            elif line.strip():
                yield number, _json_record(line, source.text)


def _json_record(line: bytes, key: str) -> Record:
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None, "the record is not UTF-8", line
    except ValueError:
        return None, "the record is no JSON", line
    if not isinstance(value, dict):
        return None, "the record is no JSON object", line
    return _record(value, key, line)


def _record(value: dict[str, Any], key: str, shown: bytes) -> Record:
    if key not in value:
        return None, f"the record has no key {key!r}", shown
    text = value[key]
    if not isinstance(text, str):
        return None, f"the value of {key!r} is no text", shown
    return text, {name: each for name, each in value.items() if name != key}


def _text(file: InputFile, source: SourceSection, limits: LimitsSection) -> Iterator[tuple[int, Record]]:
    with _opened(file) as raw:
        content = _content(open_input(file, limits, raw), limits.document + 1)
    if len(content) > limits.document:
        yield 0, (None, f"the record has more than {limits.document} bytes", content[:EXCERPT])
    elif content.startswith(UTF16):
        yield 0, (None, "the file is UTF-16, and must be UTF-8", content)
    else:
        try:
            yield 0, (content.decode("utf-8-sig"), {})
        except UnicodeDecodeError:
            yield 0, (None, "the record is not UTF-8", content)


def _parquet(file: InputFile, source: SourceSection, limits: LimitsSection) -> Iterator[tuple[int, Record]]:
    """Rows of a table. Texts stay dictionaries until their length is known: a row group of a few bytes may stand for
    many equal long texts."""
    import pyarrow as arrow
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    with _opened(file) as raw:
        names = [field.name for field in parquet.read_schema(raw) if arrow.types.is_string(field.type)]
        raw.seek(0)
        table = parquet.ParquetFile(raw, read_dictionary=names)
        columns = table.schema_arrow.names
        if source.text not in columns:
            raise Broken(f"the table has no column {source.text!r}, but {', '.join(columns)[:EXCERPT]}")
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        if sum(each.total_byte_size for each in groups) > max(FREE, file.size * limits.expansion):
            raise Broken(f"the file expands by more than a factor of {limits.expansion}")
        number = read = 0
        for batch in table.iter_batches(batch_size=ROWS):
            sizes = {}
            for name, column in zip(batch.schema.names, batch.columns):
                if arrow.types.is_dictionary(column.type):
                    lengths = compute.binary_length(column.dictionary)
                    sizes[name] = compute.take(lengths, column.indices).to_pylist()
            for row in range(batch.num_rows):
                number += 1
                size = sum(each[row] or 0 for each in sizes.values())
                read += size
                if size > limits.document:
                    yield number, (None, f"the record has more than {limits.document} bytes", b"")
                    continue
                if read > max(FREE, file.size * limits.expansion):
                    raise Broken(f"the file expands by more than a factor of {limits.expansion}")
                value = {name: _plain(column[row].as_py()) for name, column in zip(columns, batch.columns)}
                yield number, _record(value, source.text, b"")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value)


def _warc(file: InputFile, source: SourceSection, limits: LimitsSection) -> Iterator[tuple[int, Record]]:
    """Plain texts of a WARC file: records of the type `conversion`, as WET files have them.

    The file is unpacked here and not by warcio, which takes half of a compressed record for all of it."""
    import warcio.archiveiterator as iterator

    with _opened(file) as raw:
        for number, record in enumerate(iterator.ArchiveIterator(open_input(file, limits, raw)), 1):
            if record.rec_type in ("response", "resource", "revisit"):
                yield (
                    number,
                    (None, f"the record is a {record.rec_type}: extract texts first, as WET files have them", b""),
                )
            if record.rec_type != "conversion":
                continue
            content = _content(record.content_stream(), limits.document + 1)
            headers = record.rec_headers
            if len(content) > limits.document:
                yield number, (None, f"the record has more than {limits.document} bytes", content[:EXCERPT])
                continue
            if str(len(content)) != str(headers.get_header("Content-Length")).strip():
                yield number, (None, "the record has fewer bytes than its Content-Length", content)
                continue
            about = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
            try:
                yield number, (content.decode("utf-8"), {name: each for name, each in about.items() if each})
            except UnicodeDecodeError:
                yield number, (None, "the record is not UTF-8", content)


def _content(stream: Any, most: int) -> bytes:
    """The first bytes of a stream whose reads may return fewer than they are asked for."""
    parts, size = [], 0
    while size < most and (part := stream.read(min(most - size, BLOCK))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
