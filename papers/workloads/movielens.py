"""MovieLens-100K: 100,000 ratings by 943 users of 1,682 films, from a folder of the
user's.

Source: Harper and Konstan, ACM TiiS 2015;
    https://grouplens.org/datasets/movielens/100k. Its terms forbid redistribution, so
    gradwire ships none of it and fetches nothing. DEFT uses the larger MovieLens-20M of
    the same makers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import InvalidSetting
from gradwire_bench.workloads.places import folder_of, looked_in

NAME = "ml-100k"
SOURCE = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
_AGES = (18, 25, 35, 45, 50, 56)
"""The least ages of the groups from the second on, as in the makers' later data
sets.
"""
_FILES = ("u.data", "u.user", "u.item")


class Ratings(NamedTuple):
    """Ratings of items by users: users_N, items_N int64 from 0, ratings_N 1 to 5,
    times_N seconds.

    They are sorted by user, and each user's from the earliest to the latest.
    """

    users_N: Tensor
    items_N: Tensor
    ratings_N: Tensor
    times_N: Tensor
    user_fields_UF: Tensor
    """Each user's age group, gender, occupation, and first digit of the postal code
    (10: none).
    """
    item_fields_IF: Tensor
    """Each item's first listed genre, and the decade of its release (0: unknown)."""


USER_FIELDS = (len(_AGES) + 1, 2, 21, 11)
ITEM_FIELDS = (19, 10)
"""The number of categories of each field."""


def missing(folder: Path | None = None) -> str | None:
    """A text on how to get the ratings if they are not in ``folder``, or anywhere; else
    None.
    """
    if folder_of(NAME, _FILES, folder) is not None:
        return None
    return (
        f"MovieLens-100K ({', '.join(_FILES)}) is not in {looked_in(NAME, folder)}; "
        f"its terms forbid shipping it: unzip {SOURCE} there"
    )


def load(folder: Path | None = None) -> Ratings:
    """The ratings of ``folder``, or of the first place that has them.

    Raises ``InvalidSetting``, which says how to get them.
    """
    found = folder_of(NAME, _FILES, folder)
    if found is None:
        raise InvalidSetting(str(missing(folder)))
    return _read(found)


@cache
def _read(folder: Path) -> Ratings:
    rows = [
        [int(value) for value in line.split("\t")]
        for line in (folder / "u.data").read_text(encoding="utf-8").splitlines()
    ]
    rows.sort(key=lambda row: (row[0], row[3], row[1]))
    users_N, items_N, ratings_N, times_N = torch.tensor(rows).unbind(1)
    return Ratings(
        users_N - 1, items_N - 1, ratings_N, times_N, _users(folder), _items(folder)
    )


def _lines(folder: Path, name: str) -> list[list[str]]:
    text = (folder / name).read_text(encoding="latin-1")
    return [line.split("|") for line in text.splitlines()]


def _users(folder: Path) -> Tensor:
    lines = _lines(folder, "u.user")
    jobs = {job: place for place, job in enumerate(sorted({line[3] for line in lines}))}
    return torch.tensor(
        [
            (
                sum(int(age) >= first for first in _AGES),
                int(gender == "F"),
                jobs[job],
                int(code[0]) if code[:1].isdigit() else 10,
            )
            for _, age, gender, job, code in lines
        ]
    )


def _items(folder: Path) -> Tensor:
    """The fields of all items, read from the file's lines.

    A line holds a number, a title, the day of release as 01-Jan-1995, two more fields
    and 19 flags of genres.
    """
    fields = []
    for line in _lines(folder, "u.item"):
        flags = line[-19:]
        decade = (int(line[2][-4:]) - 1910) // 10 if line[2] else 0
        fields.append((flags.index("1"), decade))
    return torch.tensor(fields)
