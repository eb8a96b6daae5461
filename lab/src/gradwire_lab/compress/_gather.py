"""Values at listed elements of a dense vector; lists of elements laid together.

Legend: N elements, K listed elements, R runs of a list.
"""

import torch
from torch import Tensor

from gradwire.contract import Residual
from gradwire.errors import InvalidSetting, invalid
from gradwire.kernels.libraries import check_floating, check_vector, loader

from ._reaching import SOURCES

_load_gather = loader("gather", SOURCES)


def take(
    source_N: Tensor,
    indices_K: Tensor,
    values_K: Tensor,
    *,
    scale: float = 1.0,
    residual_N: Residual = None,
) -> None:
    """values = scale * source[indices]; then residual[indices] = 0.

    ``indices_K`` are int32 without duplicates; ``values_K`` and ``residual_N``, which
    may be ``source_N`` itself, are of its dtype. Raises InvalidSetting, with nothing
    written, where an index lies outside ``source_N``.
    """
    numel = source_N.numel()
    count = indices_K.numel()
    check_floating("source_N", source_N)
    check_vector("indices_K", indices_K, count, torch.int32)
    check_vector("values_K", values_K, count, source_N.dtype)
    check_vector("residual_N", residual_N, numel, source_N.dtype)
    library = _load_gather(source_N, residual_N)
    if library is None:
        outside = ((indices_K < 0) | (indices_K >= numel)).nonzero()
        bad = int(outside[0]) if outside.numel() else -1
        if bad < 0:
            index_K = indices_K.long()
            torch.mul(source_N[index_K], scale, out=values_K)
            if residual_N is not None:
                residual_N[index_K] = 0.0
    else:
        bad = library.gw_take(
            source_N, indices_K, count, numel, scale, values_K, residual_N
        )
    if bad >= 0:
        raise InvalidSetting(
            f"indices_K[{bad}] must lie in [0, {numel}), got {int(indices_K[bad])}; "
            "the list was made for a vector of another length"
        )


def lay_runs(
    numbers_K: Tensor | None,
    counts_R: Tensor,
    tos_R: Tensor,
    shifts_R: Tensor,
    out: Tensor,
) -> None:
    """Writes run r of ``numbers_K``, ``counts_R[r]`` long, to ``out[tos_R[r]]`` on.

    Numbers are shifted.

    Runs lie one behind the other in ``numbers_K`` and do not overlap in ``out``;
    ``shifts_R[r]`` is added to each number. None for ``numbers_K`` stands for 0, 1, 2,
    ... in every run. Numbers are int32, tables int64, all on one host. Raises
    InvalidSetting, with nothing written, for runs that do not lie in ``out`` or are not
    as long as ``numbers_K``.
    """
    num_runs = counts_R.numel()
    for name, table_R in (
        ("counts_R", counts_R),
        ("tos_R", tos_R),
        ("shifts_R", shifts_R),
    ):
        check_vector(name, table_R, num_runs, torch.int64)
    check_vector("out", out, out.numel(), torch.int32)
    if numbers_K is not None:
        check_vector("numbers_K", numbers_K, int(counts_R.sum()), torch.int32)
    if bool(((counts_R < 0) | (tos_R < 0) | (tos_R + counts_R > out.numel())).any()):
        accepted = f"within [0, {out.numel()}]"
        raise invalid(
            "tos_R and counts_R", (tos_R, counts_R), accepted, "make out longer"
        )
    library = _load_gather() if out.device.type == "cpu" else None
    if library is None:
        done = 0
        runs = zip(counts_R.tolist(), tos_R.tolist(), shifts_R.tolist(), strict=True)
        for count, to, shift in runs:
            run_K = (
                torch.arange(count)
                if numbers_K is None
                else numbers_K[done : done + count]
            )
            out[to : to + count] = run_K + shift
            done += count
        return
    tables = (counts_R, tos_R, shifts_R, num_runs)
    library.gw_lay_runs(numbers_K, *tables, out)
