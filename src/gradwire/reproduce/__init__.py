"""Papers' results beside ours, one paper a file: figures that are measured, compared and drawn.

``usbyte.py`` defines ``usbyte``, a ``Reproduction``; the folder listing is the registry. ``_frame``
says what a reproduction consists of, ``_store`` runs one and keeps what was measured. May import
everything but cli.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..load import make_registry

if TYPE_CHECKING:
    from .usbyte import usbyte as usbyte

make_registry(__name__)
