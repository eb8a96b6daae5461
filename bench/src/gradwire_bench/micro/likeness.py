"""Index sets that are like those of real models: what ``gradwire reproduce zen`` measured of them.

Its captures of 128 ranks on CPU, torch 2.13 (figures 2 and 3; it keeps them as
``sparsity-<model>.json``). Drawn sets share one pool, so they are as dense, as much alike in pairs
and as skewed; real ones thin out more slowly, and so become denser among many ranks: 4.9 times
instead of 3.1 times among 8 of the LSTM's.
"""

from __future__ import annotations

from gradwire.errors import UnknownName
from gradwire.planning.data.sparsity import DOUBLINGS, Skewness, UnitSparsity

from .draws import IndexDraws


def _sparsity(
    width: int, num_units: int, density: float, overlap: float, *skewness: float
) -> UnitSparsity:
    pairs = zip(DOUBLINGS, skewness, strict=True)
    return UnitSparsity(
        width=width,
        num_units=num_units,
        density=density,
        overlaps=(overlap,),
        skewness=tuple(Skewness(parts=parts, ratio=ratio) for parts, ratio in pairs),
    )


LIKENESSES = {
    "lstm": _sparsity(128, 20_000, 0.0112, 0.299, 1.89, 3.52, 6.4, 11.37, 19.3, 31.63, 48.67),
    "deepfm": _sparsity(32, 55_934, 0.0307, 0.299, 1.73, 2.49, 4.04, 7.32, 11.81, 12.07, 14.8),
    "transformer": _sparsity(1, 2_538_280, 0.049, 0.394, 1.3, 2.35, 2.49, 3.6, 4.97, 6.43, 9.45),
}
"""Sparsity by model: the embedding's gradient of an LSTM language model and of a DeepFM, in rows,
and the elements that DGC selects at 5 % of a transformer's."""


def draws_like(model: str, numel: int, world: int, *, density: float | None = None) -> IndexDraws:
    """Sets of ``numel`` elements with a model's overlap, skew, runs and, unless given, density.

    Raises ``UnknownName`` for another model.

    >>> draws_like("lstm", 1_000_000, 8).skew
    6.4
    """
    if model not in LIKENESSES:
        raise UnknownName("model", model, [*LIKENESSES])
    found = LIKENESSES[model]
    return IndexDraws(
        numel=numel,
        world=world,
        density=found.density if density is None else density,
        overlap=found.overlap_mean,
        skew=found.skew(world),
        run=found.width,
    )
