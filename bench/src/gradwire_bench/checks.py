"""Checks of settings that several benchmarks have."""

from collections.abc import Collection

from gradwire.contract.bounds import check_whole
from gradwire.errors import UnknownName


def check_counts(settings: object, **least: int) -> None:
    """Refuses fields of settings that are not whole numbers, or are below their
    least.
    """
    for name, smallest in least.items():
        check_whole(name, getattr(settings, name), "leave it out", least=smallest)


def check_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuses names that are not known.

    Raises:
        UnknownName: One is not, and the error lists those that are.
    """
    for name in given:
        if name not in known:
            raise UnknownName(what, name, known)
