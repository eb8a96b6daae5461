"""How exchanges of their own write lists of elements: in the shortest form, or as their
papers do.

Legend: K elements that are listed, L of the range that they are of.
"""

from gradwire.errors import invalid
from gradwire.kernels.sparse.choose import LISTS, Formats
from gradwire.kernels.sparse.formats.coo import coo

FORMATS: dict[str, Formats] = {"smallest": LISTS, "coo": (coo(),)}
"""The forms of a list by the name of a setting; "coo" is 4 bytes a place, as papers
have it.
"""


def check_formats(what: str, value: object) -> None:
    """Refuses what is no name of ``FORMATS``."""
    if value not in [*FORMATS]:  # a list: what has no hash is refused as well
        raise invalid(what, value, " or ".join(FORMATS), "leave it out")
