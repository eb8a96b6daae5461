"""Papers' results beside ours, a folder a paper: figures that are measured, compared
and drawn.

They lie beside the library and not in it, so they are there in a checkout of the
sources alone. ``deft/page.py`` defines ``deft``, a ``Reproduction``: the folder listing
is the registry. ``frame`` says what a reproduction consists of, ``store`` runs one and
keeps what was measured, ``command`` is what ``gradwire reproduce`` calls.
``workloads/`` holds models and data that only papers need. ``local_steps/`` has runs
without a page. Everything of gradwire may
be imported here; nothing of it imports this.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from gradwire.errors import UnknownName

from .frame import Reproduction


def names() -> tuple[str, ...]:
    """Names of all papers, ascending.

    >>> names()
    ('deft', 'hipress', 'ssfusion', 'usbyte', 'zen')
    """
    return tuple(
        sorted(path.parent.name for path in Path(__file__).parent.glob("*/page.py"))
    )


def page(name: str) -> Reproduction:
    """The paper of this name. Raises ``UnknownName``, which lists what there is.

    >>> page("deft").paper
    'Yoon and Oh, DEFT (ICPP 2023)'
    """
    if name not in names():
        raise UnknownName("paper", name, names())
    found: Reproduction = getattr(
        importlib.import_module(f"{__name__}.{name}.page"), name
    )
    return found
