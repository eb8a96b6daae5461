"""What tests give attach: single fields of its two objects."""

from __future__ import annotations

from typing import Any

import gradwire as gw

SMALL = gw.Options(bucket_cap_mb=0.004)
"""Messages of about one thousand elements: several even for small models."""


def keywords(**settings: Any) -> dict[str, Any]:
    """Keywords of attach: fields of its two objects go into these, as tests vary single
    ones.
    """
    kept = dict(settings)
    for keyword, kind in (("options", gw.Options), ("failure", gw.FailurePolicy)):
        own = {
            name: kept.pop(name)
            for name in settings
            if name in kind.__dataclass_fields__
        }
        if own:
            kept[keyword] = kind(**own)
    return kept
