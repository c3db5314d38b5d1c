"""Agreement of tokenizers: one for all token files of a blend, and the run's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DataError
from .tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron.config.sections.data import TokenizerSection

    from .source import SourceFile

_WITHOUT_FILES = ("bytes", "characters")


def refuse_unlike_tokenizers(files: list[SourceFile], section: TokenizerSection) -> None:
    """Refuse sources whose manifests name different tokenizers, or another than the run's.

    Files without a manifest (of other programs) cannot be compared.
    """
    known = [(each.path, each.manifest.tokenizer) for each in files if each.manifest is not None]
    for path, tokenizer in known[1:]:
        if tokenizer["hash"] != known[0][1]["hash"]:
            raise DataError(
                path,
                f"it was made with the tokenizer {tokenizer['name']}, but {known[0][0]} "
                f"with {known[0][1]['name']}, so their ids mean different texts",
                "tokenize both with one tokenizer",
            )
    if known and is_local(section):
        own, (path, tokenizer) = build_tokenizer(section), known[0]
        if own.hash != tokenizer["hash"]:
            raise DataError(
                path,
                f"it was made with the tokenizer {tokenizer['name']}, which is not the run's ({own.name})",
                "set tokenizer.path to the tokenizer that made the file",
            )


def is_local(section: TokenizerSection) -> bool:
    """Whether the run's tokenizer is on this machine. It is not downloaded only to be compared."""
    return section.type in _WITHOUT_FILES or (
        section.type != "none" and section.path is not None and Path(section.path).exists()
    )


def end_of_document(files: list[SourceFile], section: TokenizerSection) -> int | None:
    """The id of the end-of-document token: from the configuration, the manifests, or the tokenizer."""
    if section.eod_id is not None:
        return section.eod_id
    for each in files:
        if (
            section.eod_token is None
            and each.manifest is not None
            and each.manifest.tokenizer.get("eod_id") is not None
        ):
            return each.manifest.tokenizer["eod_id"]
    if section.type == "none" or (section.path is None and section.type not in _WITHOUT_FILES):
        return None
    return build_tokenizer(section).eod_id


def token_ids(section: TokenizerSection, tokens: Sequence[str], key: str) -> tuple[int, ...]:
    """The ids of special tokens of the run's tokenizer, one each.

    Raises:
        DataError: the tokenizer does not have one as a single token.
    """
    tokenizer, found = build_tokenizer(section), []
    for token in tokens:
        ids = tokenizer.encode(token)
        if len(ids) != 1:
            raise DataError(
                key,
                f"the run's tokenizer has no token {token!r}",
                "name one of its special tokens, or add it when training it",
            )
        found += ids
    return tuple(found)
