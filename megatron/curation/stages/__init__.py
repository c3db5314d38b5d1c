"""The stages that a recipe may name."""

from . import classifier, datatrove_filters, duplicates, language, texts
from .contract import StageKind

STAGES: dict[str, StageKind] = {
    "signals": texts.SIGNALS,
    "keep": texts.KEEP,
    "collapse": texts.COLLAPSE,
    "pii": texts.PII,
    "blocklist": texts.BLOCKLIST,
    "domains": texts.DOMAINS,
    "language": language.LANGUAGE,
    "classifier": classifier.CLASSIFIER,
    "c4_quality": datatrove_filters.C4_QUALITY,
    "gopher_quality": datatrove_filters.GOPHER_QUALITY,
    "gopher_repetition": datatrove_filters.GOPHER_REPETITION,
    "fineweb_quality": datatrove_filters.FINEWEB_QUALITY,
    "decontaminate": duplicates.DECONTAMINATE,
    "exact": duplicates.EXACT,
    "lines": duplicates.LINES,
    "minhash": duplicates.MINHASH,
}
