"""Profiles of well-known models, one JSON file each: ``load("vgg16")``, ``names()``.

Tensors come from the models' definitions. Times come from a throughput model of one
GPU, which each profile's ``source`` states in full. No time is a measurement.
``scripts/make_catalogue.py`` writes these files.
"""

from importlib.resources import files

from ...errors import UnknownName
from ..data.profile import Profile

_SUFFIX = ".json"


def names() -> tuple[str, ...]:
    """Names of all profiles.

    Returns:
        The names, sorted.

    >>> "vgg16" in names()
    True
    """
    listed = (entry.name for entry in files(__name__).iterdir())
    return tuple(
        sorted(name.removesuffix(_SUFFIX) for name in listed if name.endswith(_SUFFIX))
    )


def load(name: str) -> Profile:
    """The profile of that name.

    Args:
        name: One of ``names()``.

    Returns:
        The profile.

    Raises:
        UnknownName: There is no such profile. The message lists all names.

    >>> load("vgg16").layers[0].name
    'features.0'
    """
    if name not in names():
        raise UnknownName("catalogue profile", name, names())
    text = files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    return Profile.parse(text, f"catalogue profile {name!r}")
