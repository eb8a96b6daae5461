"""Table 6 of HiPress: sizes of the models' gradients, beside those of the catalogue."""

from __future__ import annotations

from gradwire.planning import catalogue

from ..frame import Ask, Claim, Findings, Row
from .printed import TABLE_6

MIB = 2**20
SLACK_MIB = 0.005
"""Half of the last digit that the paper prints."""


def table6(ask: Ask) -> Findings:
    """Mebibytes of all gradients and of the largest, and their number, by model."""
    rows = [_row(model) for model in TABLE_6]
    note = (
        "times of the catalogue are a throughput model of a V100, which each "
        "profile states"
    )
    return Findings(tuple(rows), tuple(map(claim_of, rows)), (note,))


def _row(model: str) -> Row:
    tensors = [one for layer in catalogue.load(model).layers for one in layer.tensors]
    sizes = [one.size_bytes / MIB for one in tensors]
    total, largest, count = TABLE_6[model]
    return {
        "name": model,
        "mebibytes": sum(sizes),
        "mebibytes_largest": max(sizes),
        "num_gradients": len(sizes),
        "mebibytes_paper": total,
        "mebibytes_largest_paper": largest,
        "num_gradients_paper": count,
    }


def claim_of(row: Row) -> Claim:
    """One model's sizes: they agree if all three figures are the paper's, to its last
    digit.
    """
    keys = ("mebibytes", "mebibytes_largest", "num_gradients")
    pairs = {
        key: (float(str(row[key])), float(str(row[f"{key}_paper"]))) for key in keys
    }
    unlike = [
        key for key, (ours, paper) in pairs.items() if abs(ours - paper) > SLACK_MIB
    ]
    says, in_words = (
        f"{row[f'mebibytes{end}']:.2f} MB, the largest "
        f"{row[f'mebibytes_largest{end}']:.2f} MB, "
        f"{row[f'num_gradients{end}']} gradients"
        for end in ("_paper", "")
    )
    why = (
        f"{', '.join(unlike)}: the paper does not say which head is trained, or which "
        "version; the catalogue's is its profile's source"
    )
    return Claim(
        f"{row['name']}: {says}", "table 6", in_words, not unlike, why if unlike else ""
    )
