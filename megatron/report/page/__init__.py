"""report.html: one page about one run or several, which opens anywhere without a network."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bokeh.embed import components
from bokeh.resources import Resources

from megatron.config.file_access import replace_file

from .charts import Charts
from .history import PageTable, RunHistory
from .sections import PageSection, sections

POINTS = 60_000  # of all curves together: about 3 MB of the page
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2433; background: #fff; margin: 0; }
nav { position: sticky; top: 0; z-index: 10; background: #fff; border-bottom: 1px solid #d8dce4; padding: 8px 24px;
      display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; }
nav a { color: #2454a6; text-decoration: none; } nav a:hover { text-decoration: underline; }
main { max-width: 1180px; margin: 0 auto; padding: 0 24px 64px; }
h1 { font-size: 24px; margin: 20px 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; scroll-margin-top: 64px; }
h3, summary { font-size: 15px; font-weight: 600; margin: 16px 0 6px; } summary { cursor: pointer; }
p { margin: 6px 0; color: #525c70; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 3px 12px 3px 0; text-align: left;
      vertical-align: top; border-bottom: 1px solid #e8ebf0; overflow-wrap: anywhere; }
th { white-space: nowrap; border-bottom-color: #b9c0cd; } td:first-child { white-space: nowrap; }
td.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 12px; }
.chart { margin: 10px 0; }
"""


def write_report(runs: list[RunHistory], path: str | Path, *, title: str) -> None:
    """Write the report of some runs into a file, which appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page(runs, title))


def page(runs: list[RunHistory], title: str) -> str:
    curves = sum(5 + len(run.metrics()) + len(run.validation) + len(run.tasks) for run in runs)
    charts = Charts(points=max(100, min(1500, POINTS // curves)))
    made = sections(runs, charts)
    switch = charts.switch()
    script, drawn = components([switch, *(chart for section in made for chart in section.charts)])
    pieces = iter(drawn)
    buttons = next(pieces)
    body = "\n".join(_section(section, [next(pieces) for _ in section.charts]) for section in made)
    links = " ".join(f'<a href="#{each.name}">{html.escape(each.title)}</a>' for each in made)
    folders = ", ".join(html.escape(str(run.folder)) for run in runs)
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
{Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render_js()}
</head>
<body>
<nav>{links}<span>{buttons}</span></nav>
<main>
<h1>{html.escape(title)}</h1>
<p>{folders}, written {made_at}</p>
{body}
</main>
{script}
</body>
</html>
"""


def _section(section: PageSection, charts: list[str]) -> str:
    parts = [f'<section><h2 id="{section.name}">{html.escape(section.title)}</h2>']
    if section.note:
        parts.append(f"<p>{html.escape(section.note)}</p>")
    parts += [f'<div class="chart">{chart}</div>' for chart in charts]
    parts += [_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _table(table: PageTable) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.head)
    rows = "\n".join(f"<tr>{_cells(row, table.text)}</tr>" for row in table.rows)
    whole = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    title = html.escape(table.title)
    if table.folded:
        return f"<details><summary>{title}</summary>{whole}</details>"
    return f"<h3>{title}</h3>{whole}" if title else whole


def _cells(row: Sequence[str], text: Sequence[int]) -> str:
    kinds = (' class="text"' if number in text else "" for number in range(len(row)))
    return "".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(kinds, row))
