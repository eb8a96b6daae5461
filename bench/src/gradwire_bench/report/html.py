"""One self-contained HTML file: what was run, where, the figures and the pictures.

Pictures are embedded and styles are inline, so the file can be mailed; it asks for
nothing on the network. Needs jinja2, part of the extra ``gradwire[report]``.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.cli.report.table import Row, cell, cells, columns, heading, is_numeric
from gradwire.contract.files import write_text
from gradwire.errors import NotInstalled

TEMPLATE = Path(__file__).with_name("report.html")


def write(
    path: Path,
    *,
    title: str,
    command: str,
    machine: Mapping[str, object],
    rows: Sequence[Row],
    pictures: Mapping[str, Path],
    notes: Sequence[str],
    answer: str = "",
) -> Path:
    """Writes the report and returns its path.

    ``command`` is the command line that made the figures, and ``answer`` is one
    sentence about them. ``pictures`` maps captions to PNG files, which are copied into
    the text. All texts are escaped. Raises NotInstalled without jinja2.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ModuleNotFoundError:
        raise NotInstalled("an HTML report", "jinja2", "report") from None
    number = Markup(' class="number"')
    keys = columns(rows)
    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        title=title,
        command=command,
        answer=answer,
        head=[(heading(key), number if is_numeric(rows, key) else "") for key in keys],
        lines=cells(rows),
        notes=list(notes),
        pictures=[
            (caption, base64.b64encode(picture.read_bytes()).decode("ascii"))
            for caption, picture in pictures.items()
        ],
        machine=[(heading(key), cell(key, value)) for key, value in machine.items()],
    )
    write_text(path, text)
    return path
