"""Entries of a part written to the dense vector: the last step of a pull.

Legend: N elements, K entries.
"""

from torch import Tensor

from ...errors import InvalidSetting, invalid
from ..libraries import first_outside, loader
from .entries import Entries, Part, check_entries, num_units

_load_scatter = loader("scatter")


def scatter_entries(
    entries: Entries, part: Part, out_N: Tensor, scale: float = 1.0
) -> None:
    """``out[part.indices(place)] = scale * value`` for each unit.

    The rest of ``out_N`` stays.

    ``entries`` hold local places without duplicates. A last unit that reaches beyond
    ``out_N`` is cut. Values are scaled in their own dtype, then rounded to ``out_N``'s.
    Raises InvalidSetting where a place is not in the part.
    """
    check_entries(entries)
    _check_out(part, out_N, entries.width)
    local_K, values, width = entries
    library = _load_scatter(values, out_N)
    if library is None:
        bad = _reference(entries, part, out_N, scale)
    else:
        bad = library.gw_scatter(
            local_K,
            values,
            entries.num,
            part.length,
            part.first,
            None if part.permutation is None else part.permutation.constants,
            out_N,
            out_N.numel(),
            width,
            scale,
        )
    if bad >= 0:
        raise InvalidSetting(
            f"place {bad} must lie in [0, {part.length}), got {int(local_K[bad])}; "
            "give every rank the same vector, world and permutation"
        )


def _reference(entries: Entries, part: Part, out_N: Tensor, scale: float) -> int:
    local_K, values, width = entries
    bad = first_outside(local_K, part.length)
    if bad >= 0:
        return bad
    scaled = (
        (values if scale == 1.0 else values * scale).to(out_N.dtype).view(-1, width)
    )
    put_units(out_N, part.indices(local_K), scaled)
    return -1


def put_units(out_N: Tensor, indices_K: Tensor, units_Kw: Tensor) -> None:
    """Writes units; elements of the last unit that lie beyond ``out_N`` are dropped."""
    width = units_Kw.shape[1]
    whole = out_N.numel() // width
    inside = indices_K < whole
    rows_Uw = out_N[: whole * width].view(whole, width)
    rows_Uw[indices_K[inside].long()] = units_Kw[inside]
    rest_r = out_N[whole * width :]
    if rest_r.numel():
        for unit_w in units_Kw[~inside]:  # one at most
            rest_r.copy_(unit_w[: rest_r.numel()])


def _check_out(part: Part, out_N: Tensor, width: int) -> None:
    """Raises InvalidSetting unless ``out_N`` is the whole of ``part``'s vector."""
    if num_units(out_N.numel(), width) != part.num_units or not out_N.is_contiguous():
        raise invalid(
            "out_N",
            f"{out_N.numel()} elements",
            f"a contiguous vector of {part.num_units} units of {width}",
            "pass the vector that the part was made for",
        )
