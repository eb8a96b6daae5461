"""Pairs of features: each is refused by a sentence, or a test trains with both.

The table of ``gradwire.runtime.pairs`` says which are refused, and by what words. All
other pairs of ``ALL`` go together, which ``SHOWN`` shows.
"""

from itertools import combinations

from gradwire.runtime.pairs import CAUTIONS, REFUSED, Feature, RefusedPair

EXCHANGES = (
    "none",
    "error feedback",
    "momentum correction",
    "powersgd",
    "deft",
    "selective",
    "a plan",
    "a plan with overlap",
    "auto",
)
MODELS = ("plain module", Feature.DDP, Feature.DTENSORS)
ALL = (
    *EXCHANGES,
    Feature.LOCAL_STEPS,
    Feature.QUORUM,
    *MODELS,
    *("mesh", "shards", "sparse rows", "compiled", "reentrant checkpoint"),
    *(
        "scaler",
        "optimizer",
        "bucket_cap_mb",
        "num_channels",
        "compress_if",
        "guard_every",
    ),
    *("backend", "on_failure", "check_every", "checksums"),
)
"""The features whose pairs the table is of; an attach has one exchange and one kind of
model.
"""
SHOWN = "tests/runtime/test_pairs.py::test_what_goes_together"
"""The test that trains with each pair that is not refused."""
_IMPLIED: dict[str, str] = {
    Feature.PLAN_WITH_OVERLAP: Feature.PLAN,
    Feature.SPARSE_ROWS: Feature.SPARSE_DTENSORS,
    Feature.QUORUM: Feature.LOCAL_STEPS,
    Feature.LOCAL_STEPS: Feature.LOCK_STEP,
    **dict.fromkeys(
        ("powersgd", "deft", "selective", "momentum correction"),
        Feature.JOINT_PAYLOAD,
    ),
}
MARKS = "<!-- pairs -->", "<!-- end of the pairs -->"


def pairs() -> list[tuple[str, str]]:
    """Every pair of features that one attach may have."""
    return [
        (first, second)
        for first, second in combinations(ALL, 2)
        if not any({first, second} <= {*kind} for kind in (EXCHANGES, MODELS))
    ]


def refusal_of(first: str, second: str) -> RefusedPair | None:
    """The refusal of a pair; None where it goes together."""
    names = [{name, _IMPLIED.get(name, name)} for name in (first, second)]
    for pair in REFUSED:
        for mine, other in (names, names[::-1]):
            if pair.first in mine and pair.second in other:
                return pair
    return None


def together(first: str) -> list[str]:
    """The later features that one goes with."""
    return [b for a, b in pairs() if a == first and refusal_of(a, b) is None]


def markdown() -> str:
    """The section of the table's page."""
    refused = [
        (a, b, found) for a, b in pairs() if (found := refusal_of(a, b)) is not None
    ]
    lines = ["| feature | beside | refused |", "| --- | --- | --- |"]
    lines += [f"| {a} | {b} | {_sentence(refusal)} |" for a, b, refusal in refused]
    lines += ["", "| feature | beside | works, with a warning |", "| --- | --- | --- |"]
    for pair in CAUTIONS:
        warning = pair.text.format(first="...", second="...")
        lines.append(f"| {pair.first} | {pair.second} | {warning} |")
    works = len(pairs()) - len(refused)
    lines += [
        "",
        f"Features: {', '.join(ALL)}. The first {len(EXCHANGES)} features are "
        "exchanges. Each call of `attach` takes one exchange and one kind of model: "
        f"{', '.join(MODELS)}. Of the {len(pairs())} pairs {len(refused)} are refused, "
        f"and {works} work. The test `{SHOWN}` trains with each pair that works.",
    ]
    return "\n".join(lines)


def _sentence(pair: RefusedPair) -> str:
    text = f"{pair.what} must be {pair.accepted}; {pair.remedy}"
    return text.format(first="...", second=pair.second)
