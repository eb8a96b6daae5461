"""Figure 17a of ZEN: how large each sparse format is over density, encoded and counted.

Sizes are those of all servers' parts together, as one worker receives them in a pull
from 16 servers with hashed parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradwire.kernels.sparse.entries import Entries, Part, parts_of
from gradwire.kernels.sparse.format import SparseFormat
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.planning.data.sparsity import BLOCK
from gradwire_bench.report import curves
from gradwire_lab.formats.blocks import blocks

from ..frame import Ask, Claim, Findings, Row
from .bitmap import bitmap
from .captures import MODELS, captured, present
from .sparsity import findings
from .values import number
from .volumes import union

SERVERS = 16
NUMEL = 2**20
QUICK_NUMEL = 2**17
DENSITIES = (
    0.01,
    0.02,
    1 / 32,
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.99,
)
FORMATS: dict[str, SparseFormat] = {
    "hash_bitmap": hash_bitmap(),
    "coo": coo(),
    "bitmap": bitmap(),
    "blocks": blocks(block=BLOCK),
}
ANYWHERE = "anywhere"
"""The name of rows whose elements are drawn uniformly; the others have a model's
own.
"""
UNPRINTED = frozenset({"of"})
PAPER_BLOCKS = 0.30
"""The share of the gradient that blocks of 256 send at a density of 5 %: section
3.3.1.
"""


def figure17a(
    ask: Ask,
    densities: Sequence[float] = DENSITIES,
    models: Sequence[str] = MODELS,
    numel: int | None = None,
) -> Findings:
    """The bytes of each format over those of the dense tensor."""
    numel = numel or (QUICK_NUMEL if ask.quick else NUMEL)
    rows = []
    for done, density in ask.each(densities):
        ask.report(0.7 * done, f"density {density:.2g}")
        drawn_N = torch.rand(numel, generator=torch.Generator().manual_seed(0))
        indices_K = (drawn_N < density).nonzero()[:, 0].int()
        rows.append(
            _row(f"{ANYWHERE}, {100 * density:.3g} %", ANYWHERE, indices_K, numel)
        )
    for done, model in ask.each(present(models)):
        ask.report(0.7 + 0.3 * done, model)
        found = captured(ask, model, SERVERS)
        sets = found.elements(SERVERS)
        rows.append(_row(f"{model}, one rank", model, sets[0], found.numel))
        summed_K = union(sets, found.numel)
        rows.append(_row(f"{model}, sum of {SERVERS}", model, summed_K, found.numel))
    return findings(rows, claims17a(rows), models)


def _row(name: str, of: str, indices_K: Tensor, numel: int) -> Row:
    sizes = {key: encoded_bytes(key, indices_K, numel) for key in FORMATS}
    return {
        "name": name,
        "of": of,
        "fraction_density": indices_K.numel() / numel,
        **{f"fraction_{key}": size / (4 * numel) for key, size in sizes.items()},
    }


def encoded_bytes(key: str, indices_K: Tensor, numel: int) -> int:
    """Bytes of all servers' payloads in one format.

    Blocks are cut from the unhashed vector, as OmniReduce does. A plain bitmap has a
    bit for each index of the whole vector in every server's payload, as a hashed part
    may hold any index.
    """
    form = FORMATS[key]
    permutation = Permutation(numel) if key != "blocks" else None
    return sum(
        form.encode(*_as_sent(key, indices_K, part)).size_bytes
        for part in parts_of(numel, SERVERS, permutation)
    )


def _as_sent(key: str, indices_K: Tensor, part: Part) -> tuple[Entries, int]:
    """The part's entries with the indices that the format takes, and the number of
    units it tells apart.
    """
    permutation = part.permutation
    places_K = indices_K if permutation is None else permutation.places(indices_K)
    own_K = (places_K >= part.first) & (places_K < part.first + part.length)
    if key == "bitmap":
        return _entries(indices_K[own_K]), part.num_units
    return _entries((places_K[own_K] - part.first).sort().values), part.length


def _entries(indices_K: Tensor) -> Entries:
    return Entries(indices_K, torch.ones(indices_K.numel()))


def claims17a(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of sections 3.3.1 and 5.3 about formats, beside the rows."""
    drawn = [row for row in rows if row["of"] == ANYWHERE]
    return (
        _saves_up_to(drawn),
        _halves(drawn),
        _gap(drawn),
        _blocks(rows),
        _above_coo(rows),
    )


def _share(row: Row, key: str) -> float:
    return number(row, f"fraction_{key}")


def _saves_up_to(drawn: Sequence[Row]) -> Claim:
    below = [_share(row, "density") for row in drawn if _share(row, "hash_bitmap") < 1]
    most = max(below, default=0.0)
    agrees = most >= 0.945
    return Claim(
        "the hash bitmap still saves traffic at a density of 95 %",
        "section 5.3, figure 17a",
        f"up to {100 * most:.1f} % of those measured; by its formula up to "
        f"{100 * 31 / 32:.1f} %",
        agrees,
        "" if agrees else "no density near 95 % was measured",
    )


def _halves(drawn: Sequence[Row]) -> Claim:
    most = {
        key: max(
            (_share(row, "density") for row in drawn if _share(row, key) < 1),
            default=0.0,
        )
        for key in ("coo", "bitmap")
    }
    agrees = all(density <= 0.505 for density in most.values())
    return Claim(
        "the bitmap and COO save nothing above a density of 50 %",
        "section 5.3, figure 17a",
        f"COO saves up to {100 * most['coo']:.0f} %, the bitmap up to "
        f"{100 * most['bitmap']:.0f} %",
        agrees,
        ""
        if agrees
        else "a bitmap of the whole vector in each of 16 payloads is half a tensor",
    )


def _gap(drawn: Sequence[Row]) -> Claim:
    gaps = [_share(row, "coo") - _share(row, "hash_bitmap") for row in drawn]
    grows = gaps == sorted(gaps) and gaps[0] < gaps[-1]
    smaller = (
        _share(row, "density") for row, gap in zip(drawn, gaps, strict=True) if gap > 0
    )
    from_ = min(smaller, default=1.0)
    return Claim(
        "the gap between the hash bitmap and COO grows with density",
        "section 5.3, figure 17a",
        f"{gaps[0]:+.3f} to {gaps[-1]:+.3f} of the dense tensor; the hash bitmap is "
        f"the smaller one from {100 * from_:.2g} % on",
        grows,
        "" if grows else "it does not grow from each density to the next",
    )


def _blocks(rows: Sequence[Row]) -> Claim:
    says = (
        "of OPT-2.7B with DGC of 5 %, blocks of 256 send more than 30 % of the "
        "gradients"
    )
    place = "section 3.3.1"
    row = next((row for row in rows if row["name"] == "transformer, one rank"), None)
    if row is None:
        return Claim(says, place, "not measured", None)
    share = _share(row, "blocks")
    agrees = share > PAPER_BLOCKS
    why = "" if agrees else "what DGC selects lies closer together here, in few rows"
    return Claim(says, place, f"{100 * share:.1f} % of the transformer's", agrees, why)


def _above_coo(rows: Sequence[Row]) -> Claim:
    above = [row for row in rows if _share(row, "blocks") > _share(row, "coo")]
    models = [str(row["name"]) for row in above if row["of"] != ANYWHERE]
    return Claim(
        "some models' blocks are larger than COO, as most of a non-zero block is zeros",
        "section 5.3",
        f"of models: {', '.join(models) or 'none'}",
        bool(models),
        "" if models else "rows of an embedding fill their blocks",
    )


def draw17a(rows: Sequence[Row], path: Path) -> Path:
    """Draws sizes over density for elements drawn anywhere; blocks of models have own
    marks.
    """
    drawn = [row for row in rows if row["of"] == ANYWHERE]
    series = {
        key.replace("_", " "): [
            (_share(row, "density"), _share(row, key)) for row in drawn
        ]
        for key in FORMATS
    }
    series["dense"] = [(_share(row, "density"), 1.0) for row in drawn]
    for model in dict.fromkeys(str(row["of"]) for row in rows if row["of"] != ANYWHERE):
        own = [row for row in rows if row["of"] == model]
        series[f"blocks, {model}"] = [
            (_share(row, "density"), _share(row, "blocks")) for row in own
        ]
    return curves.draw_panels(
        {"": series},
        path,
        title=f"Bytes of {SERVERS} servers' sums",
        x_label="density of the sum",
        y_label="of the dense tensor",
    )
