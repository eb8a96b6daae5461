"""Real text that every Python has: its documentation topics.

Python's licence allows reading what it installed; nothing of it is shipped here.
"""

import sys
from importlib import resources

from gradwire.errors import InvalidSetting


def topics() -> bytes:
    """Python's documentation topics (what ``help("LAMBDAS")`` shows): 0.7 MB of
    English.
    """
    try:
        return resources.files("pydoc_data").joinpath("topics.py").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise InvalidSetting(
            f"the standard library of {sys.executable} lacks its documentation topics, "
            "pydoc_data/topics.py, which are trained on; use a Python that has "
            "all of its library"
        ) from None
