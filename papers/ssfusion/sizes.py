"""Table 2 of SSFusion: small and large tensors of four models, counted in the
catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.planning import catalogue

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .printed import SMALL_NUMEL, TABLE_2


def table2(ask: Ask, models: Sequence[str] = tuple(TABLE_2)) -> Findings:
    """The share of small tensors, those of up to 102,400 elements, in number and in
    size.
    """
    rows = [_row(model) for model in models]
    return Findings(tuple(rows), tuple(claim_of(row) for row in rows))


def _row(model: str) -> Row:
    layers = catalogue.load(model).layers
    numels = [one.numel for layer in layers for one in layer.tensors]
    small = [numel for numel in numels if numel <= SMALL_NUMEL]
    return {
        "name": model,
        "num_tensors": len(numels),
        "num_small": len(small),
        "fraction_small": len(small) / len(numels),
        "fraction_small_in_size": sum(small) / sum(numels),
        "fraction_small_over_large": sum(small) / (sum(numels) - sum(small)),
    }


def claim_of(row: Row) -> Claim:
    """The printed shares of one model beside the row's; both must agree to the last
    decimal.
    """
    stated, size = TABLE_2[str(row["name"])]
    ours = number(row, "fraction_small")
    ours_of_size = number(row, "fraction_small_in_size")
    why = [*_why_number(row, stated), *_why_size(row, size)]
    return Claim(
        f"{100 * stated:.2f} % of {row['name']}'s tensors are small, and "
        f"{100 * size:.2f} % of its size",
        "table 2",
        f"{100 * ours:.2f} % ({row['num_small']} of {row['num_tensors']}), and "
        f"{100 * ours_of_size:.2f} %",
        not why,
        "; ".join(why),
    )


def _why_number(row: Row, stated: float) -> list[str]:
    if _is_printed(number(row, "fraction_small"), stated):
        return []
    small, of = nearest(stated, int(number(row, "num_tensors")))
    return [
        f"{100 * stated:.2f} % are {small} of {of} tensors, so the paper's model has "
        f"{small - int(number(row, 'num_small')):+d} small and "
        f"{of - int(number(row, 'num_tensors')):+d} in all"
    ]


def _why_size(row: Row, stated: float) -> list[str]:
    found = number(row, "fraction_small_in_size")
    over = number(row, "fraction_small_over_large")
    if _is_printed(found, stated):
        return []
    return [
        f"of the size they are {100 * found:.2f} %, and of the large ones' "
        f"{100 * over:.2f} %"
        + (", which is what is printed" if _is_printed(over, stated) else "")
    ]


def _is_printed(found: float, stated: float) -> bool:
    """Whether a share is printed as the stated one, with two decimals of a per cent."""
    return f"{100 * found:.2f}" == f"{100 * stated:.2f}"


def nearest(stated: float, count: int) -> tuple[int, int]:
    """The number of small tensors and of all nearest ``count`` whose share is printed
    as stated.

    >>> nearest(0.6276, 392)
    (246, 392)
    """
    for off in range(count):
        for of in (count - off, count + off):
            small = round(stated * of)
            if _is_printed(small / of, stated):
                return small, of
    raise AssertionError("no share of two decimals is that far from all fractions")
