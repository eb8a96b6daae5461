"""Fingerprints: the facts that all ranks must share before a gradient is sent.

Where ranks differ, an error names the difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from ...errors import RankFailed, RanksDiffer
from ...version import WIRE, __version__
from ..liveness.membership import Membership

Fingerprint = dict[str, Any]

NETWORK = "network"
SETTINGS = "settings"
_TENSORS = "tensors"
REFUSAL = "refusal"


def fingerprint(
    tensors: Sequence[tuple[str, torch.Tensor, str]], settings: dict[str, object]
) -> Fingerprint:
    """Versions, settings, and every tensor's name, shape, dtype and treatment."""
    return {
        SETTINGS: {
            "gradwire version": __version__,
            "wire version": WIRE,
            "torch version": torch.__version__.partition("+")[0],
            **{f"setting {name}": repr(value) for name, value in settings.items()},
        },
        _TENSORS: [
            (name, tuple(t.shape), str(t.dtype), how) for name, t, how in tensors
        ],
    }


def agree(who: Membership, fingerprint: Fingerprint, timeout: timedelta) -> list[Any]:
    """Raises ``RanksDiffer`` on every rank if one refused or two fingerprints differ.

    Returns all fingerprints in rank order. They may differ in all but settings and
    tensors.
    """

    def compared(announced: Mapping[int, Any]) -> list[Any]:
        refuse_if_one_did(announced, "rank {} refused to attach")
        remedy = "start all ranks with the same model, settings and versions"
        refuse_differences(
            announced, "rank", "do not train the same thing", remedy, difference
        )
        return [*announced.values()]

    return who.agree(fingerprint, compared, timeout)


def post_refusal(who: Membership, error: Exception) -> None:
    """Tells the other ranks, who may wait for this one, why it refuses to go on.

    It gives waiting ranks the time to hear it.
    """
    if who.world > 1:
        with suppress(RankFailed):  # of the store, beside the error that matters
            who.post({REFUSAL: f"{type(error).__name__}: {error}"})
            who.linger()


@contextmanager
def refusing(
    *groups: Membership, unless: tuple[type[Exception], ...] = ()
) -> Iterator[list[Membership]]:
    """Announces errors that the block raises to other ranks, which may wait for it.

    Errors of the types ``unless`` are not announced. The block gets the list of groups
    that an error is announced to, and may change it.
    """
    listeners = [*groups]
    try:
        yield listeners
    except unless:
        raise
    except Exception as error:
        for who in listeners:
            post_refusal(who, error)
        raise


def refusals(found: Mapping[int, Any]) -> dict[int, str]:
    """The refusals among these values of ranks."""
    return {rank: value[REFUSAL] for rank, value in found.items() if REFUSAL in value}


def refuse_if_one_did(found: Mapping[int, Any], how: str) -> None:
    """Raises ``RanksDiffer`` if a rank's value is a refusal.

    ``how`` says who, with {} for it.
    """
    for rank, refusal in refusals(found).items():
        raise RanksDiffer(f"{how.format(rank)}: {refusal}")


def refuse_differences(
    found: Mapping[int, Any],
    kind: str,
    how: str,
    remedy: str,
    difference: Callable[[Any, Any], str | None],
    *,
    names_all: bool = False,
) -> None:
    """Raises ``RanksDiffer`` if notes differ from the first rank's.

    Names the first that does.
    """
    ranks: dict[str, list[str]] = {}
    first = min(found)
    for rank, announced in found.items():
        if text := difference(found[first], announced):
            ranks.setdefault(text, []).append(str(rank))
            if not names_all:
                break
    if ranks:
        texts = [
            f"{kind} {first} and {kind} {', '.join(ranks[t])} {how}: {t}" for t in ranks
        ]
        raise RanksDiffer(f"{'; '.join(texts)}; {remedy}")


def first_difference(
    one: Mapping[str, object], other: Mapping[str, object]
) -> str | None:
    """The first entry in which two notes differ; None if they are the same.

    >>> first_difference({"step": 1}, {"step": 2}), first_difference({"step": 1}, {})
    ('step is 1 against 2', 'only one of both has step')
    """
    for key in (*one, *other):
        if key not in one or key not in other:
            return f"only one of both has {key}"
        if one[key] != other[key]:
            return f"{key} is {one[key]} against {other[key]}"
    return None


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """The first thing in which two ranks' fingerprints differ.

    None if they are the same.
    """
    settings = one[SETTINGS]
    others = other[SETTINGS]
    for key in settings:
        if key in others and settings[key] != others[key]:
            return f"{key} is {settings[key]} against {others[key]}"
    tensors = one[_TENSORS]
    other_tensors = other[_TENSORS]
    for a, b in zip(tensors, other_tensors, strict=False):
        if a != b:
            return f"{_shown(a)} against {_shown(b)}"
    if len(tensors) != len(other_tensors):
        return f"{len(tensors)} parameters and buffers against {len(other_tensors)}"
    # settings of one alone last, as most of these follow from the tensors
    return first_difference(settings, others)


def _shown(tensor: Sequence[Any]) -> str:
    name, shape, dtype, how = tensor
    return f"{name} {list(shape)} {dtype.removeprefix('torch.')} ({how})"
