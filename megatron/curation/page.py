"""The page of a finished curation: counts by source, what each stage removed, and samples of it."""

from html import escape
from typing import Any

RULES = {
    "body": "font:15px sans-serif|max-width:70em|margin:2em auto",
    "td,th": "padding:.2em .8em|text-align:right",
    "td:first-child,th:first-child": "text-align:left",
    "pre": "white-space:pre-wrap|background:#f4f4f4|padding:.6em|max-height:16em|overflow:auto",
    ".bar": "background:#47a|height:.8em|display:block",
}
STYLE = "".join(f"{name}{{{rule.replace('|', ';')}}}" for name, rule in RULES.items())


def page(report: dict[str, Any]) -> str:
    """HTML without scripts. Every text of a document or a file name is escaped.

    Args:
        report: as in `report.json`.
    """
    entered, kept = sum(report["documents"].values()), sum(report["kept"].values())
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Curation</title><style>{STYLE}</style><h1>Curation</h1>",
        f"<p>{report['files']:,} files, {report['bytes']:,} bytes. {entered:,} documents read, {kept:,} kept.</p>",
        _sources(report),
        _flow(report, entered, kept),
        _noted(report, entered),
        _quarantine(report),
        *(_samples(stage, reasons) for stage, reasons in sorted(report["samples"].items())),
    ]
    return "\n".join(parts) + "\n"


def _row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{each}</{tag}>" for each in cells) + "</tr>"


def _sources(report: dict[str, Any]) -> str:
    head = ["source", "documents", "characters", "kept", "kept characters", "share"]
    rows = [_row(head, "th")]
    for name, count in sorted(report["documents"].items()):
        left = report["kept"].get(name, 0)
        numbers = (count, report["characters"][name], left, report["kept_characters"].get(name, 0))
        rows.append(_row([escape(name), *(f"{each:,}" for each in numbers), f"{left / count:.1%}"]))
    return f"<h2>Sources</h2><table>{''.join(rows)}</table>"


def _flow(report: dict[str, Any], entered: int, kept: int) -> str:
    rows, left = [_row(["stage", "removed", "left", ""], "th"), _row(["read", "", f"{entered:,}", _bar(1)])], entered
    for stage in report["stages"]:
        gone = sum(sum(sources.values()) for sources in report["removed"].get(stage, {}).values())
        left -= gone
        rows.append(_row([escape(stage), f"{gone:,}", f"{left:,}", _bar(left / max(entered, 1))]))
    note = f"<p>{left - kept:,} documents were quarantined by a stage.</p>" if left != kept else ""
    return f"<h2>Stages</h2><table>{''.join(rows)}</table>{note}"


def _noted(report: dict[str, Any], entered: int) -> str:
    """Counts of stages about documents that they keep, with their removals for comparison."""
    rows = [_row(["stage", "counted", "number", "per 100 documents read"], "th")]
    for stage, found in sorted(report["noted"].items()):
        gone = sum(sum(sources.values()) for sources in report["removed"].get(stage, {}).values())
        counts = {what: sum(sources.values()) for what, sources in sorted(found.items())} | {"removed": gone}
        for what, count in counts.items():
            rows.append(_row([escape(stage), escape(what), f"{count:,}", f"{100 * count / max(entered, 1):,.2f}"]))
    return f"<h2>Counted, and kept</h2><table>{''.join(rows)}</table>" if len(rows) > 1 else ""


def _bar(share: float) -> str:
    return f'<span class=bar style="width:{20 * share:.2f}em"></span>'


def _quarantine(report: dict[str, Any]) -> str:
    rows = [_row(["quarantined", "records or files"], "th")]
    for reason, sources in sorted(report["quarantined"].items()):
        rows.append(_row([escape(reason), f"{sum(sources.values()):,}"]))
    empty = "<p>Nothing was quarantined.</p>"
    return "<h2>Quarantine</h2>" + (f"<table>{''.join(rows)}</table>" if len(rows) > 1 else empty)


def _samples(stage: str, reasons: dict[str, list]) -> str:
    parts = [f"<h2>Samples: {escape(stage)}</h2>"]
    for reason, samples in sorted(reasons.items()):
        parts.append(f"<h3>{escape(reason)}</h3>")
        for _, name, detail, text in samples:
            parts.append(f"<p><b>{escape(name)}</b> {escape(detail)}</p><pre>{escape(text)}</pre>")
    return "\n".join(parts)
