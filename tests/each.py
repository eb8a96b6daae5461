"""Many small cases in one test: all are tried, and each that fails is named."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest


def each(
    names: str,
    cases: Iterable[Any],
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``pytest.mark.parametrize`` for cases of no set-up: one test, and a subtest for
    each case that fails.

    A fixture is made once for all cases. A test that somebody wants to run alone, or
    that takes longer than a glance, stays parametrized.
    """
    keys, cases = [name.strip() for name in names.split(",")], list(cases)
    assert cases, f"no cases of {names}"

    def label(number: int, values: Sequence[Any]) -> str:
        if isinstance(ids, Sequence):
            return ids[number]
        return "-".join(str(ids(value)) if ids else repr(value) for value in values)

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, case in enumerate(cases):
                values = case if len(keys) > 1 else (case,)
                own = dict(zip(keys, values, strict=True))
                if takes_subtests:
                    own["subtests"] = subtests
                try:
                    test(**fixtures, **own)
                except BaseException:
                    # Thousands of reports of cases that pass would take seconds.
                    with subtests.test(label(number, values)):
                        raise

        asked = inspect.signature(test).parameters
        takes_subtests = "subtests" in asked
        others = [p for name, p in asked.items() if name not in (*keys, "subtests")]
        first = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
        return run

    return decorated


def sampled(name: str, cases: Sequence[Any], every: int = 2) -> pytest.MarkDecorator:
    """Two tests of many cases: one of a sample of them, and a slow one of the others.

    For cases that one run has together, as a list under ``name``.
    """
    sample = list(cases[::every])
    others = [case for place, case in enumerate(cases) if place % every]
    slow = pytest.param(others, marks=pytest.mark.slow)
    return pytest.mark.parametrize(name, [sample, slow], ids=["sample", "others"])


def few(
    names: str,
    cases: Iterable[Any],
    fast: int = 1,
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` whose cases behind the first ``fast`` are slow."""
    cases = list(cases)
    rest: list[Any] = [
        pytest.param(*(case if "," in names else [case]), marks=pytest.mark.slow)
        for case in cases[fast:]
    ]
    return pytest.mark.parametrize(names, cases[:fast] + rest, ids=ids)


def by_file(subjects: Sequence[Any]) -> pytest.MarkDecorator:
    """A test for each file of ``compress/``: the ``places`` of all subjects made of
    it. Those of the lab's files are slow.
    """
    places = defaultdict(list)
    for place, subject in enumerate(subjects):
        places[type(getattr(subject, "codec", subject))].append(place)
    params = [
        pytest.param(
            own,
            id=kind.__name__,
            marks=[pytest.mark.slow] * kind.__module__.startswith("gradwire_lab."),
        )
        for kind, own in places.items()
    ]
    return pytest.mark.parametrize("places", params)
