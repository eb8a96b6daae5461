"""One self-contained HTML file: what was run, where, the figures and the pictures.

Pictures are embedded and styles are inline, so the file can be mailed; it asks for nothing on the
network. Needs jinja2, part of the extra ``gradwire[report]``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.cli.report.table import Row, cell, cells, columns, heading, is_numeric
from gradwire.errors import NotInstalled

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  :root { color-scheme: light; --ink: #24292f; --dim: #656d76; --line: #d8dee4; --band: #f6f8fa; }
  body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
         color: var(--ink); background: #fff; max-width: 1100px; margin: 0 auto;
         padding: 2.5rem 1.5rem 4rem; }
  h1 { font-size: 1.65rem; margin: 0 0 .75rem; }
  h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
  code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
  .command { display: block; background: var(--band); border: 1px solid var(--line);
             border-radius: 6px; padding: .7rem 1rem; overflow-x: auto; white-space: pre; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { padding: .45rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
  th { color: var(--dim); font-weight: 600; font-size: .86rem; }
  td.number, th.number { text-align: right; white-space: nowrap; }
  td:first-child { font-weight: 600; }
  tbody tr:hover { background: var(--band); }
  figure { margin: 0 0 2rem; }
  figcaption { color: var(--dim); font-size: .9rem; margin-bottom: .4rem; }
  img { max-width: 100%; border: 1px solid var(--line); border-radius: 6px; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0; }
  dt { color: var(--dim); }
  dd { margin: 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<code class="command">{{ command }}</code>
{% if head %}
<h2>Results</h2>
<div class="scroll"><table>
<thead><tr>{% for name, css in head %}<th{{ css }}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for line in lines %}
<tr>{% for text in line %}<td{{ head[loop.index0][1] }}>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if notes %}
<h2>Notes</h2>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endif %}
{% if pictures %}
<h2>Pictures</h2>
{% for caption, data in pictures %}
<figure><figcaption>{{ caption }}</figcaption>
<img alt="{{ caption }}" src="data:image/png;base64,{{ data }}"></figure>
{% endfor %}
{% endif %}
<h2>Machine</h2>
<dl>{% for key, text in machine %}<dt>{{ key }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
</body>
</html>
"""


def write(
    path: Path,
    *,
    title: str,
    command: str,
    machine: Mapping[str, object],
    rows: Sequence[Row],
    pictures: Mapping[str, Path],
    notes: Sequence[str],
) -> Path:
    """Writes the report and returns its path.

    ``command`` is the command line that made the figures; ``pictures`` maps captions to PNG files,
    which are copied into the text. All texts are escaped. Raises NotInstalled without jinja2.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ModuleNotFoundError:
        raise NotInstalled("an HTML report", "jinja2", "report") from None
    number = Markup(' class="number"')
    keys = columns(rows)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE
    )
    text = template.render(
        title=title,
        command=command,
        head=[(heading(key), number if is_numeric(rows, key) else "") for key in keys],
        lines=cells(rows),
        notes=list(notes),
        pictures=[
            (caption, base64.b64encode(picture.read_bytes()).decode("ascii"))
            for caption, picture in pictures.items()
        ],
        machine=[(heading(key), cell(key, value)) for key, value in machine.items()],
    )
    path.write_text(text, encoding="utf-8")
    return path
