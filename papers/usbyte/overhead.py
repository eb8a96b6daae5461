"""Table 5 of US-Byte: the seconds of partitioning, if it were done in each iteration.

The paper's scheduler partitions in each iteration. A plan here is made once, so this is
what is saved: the seconds of one pass of algorithm 1 under its order, and of cutting
into even blocks, each over the iteration that its planner predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.contract.registry import load
from gradwire.planning.buckets import Bucket, buckets
from gradwire.planning.price import iteration_s
from gradwire_lab.planning.blocks import block_starts
from gradwire_lab.planning.phases import Instance, greedy

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .blocks import CLOCK, CREDIT, WHY_SLOW
from .readings import OURS
from .setting import MBIT, MODELS, RANKS, profile_of

BASIC_BYTES = 4 * MBIT
TABLE_5 = {
    "googlenet": (0.0093, 0.0051),
    "resnet50": (0.0145, 0.0055),
    "vgg16": (0.0024, 0.0069),
    "mobilenet_v2": (0.0123, 0.0047),
    "inception_v3": (0.0178, 0.0059),
    "bert_base": (0.0172, 0.0066),
}
"""Shares of an iteration: US-Byte, ByteScheduler."""


def table5(
    ask: Ask, models: Sequence[str] = MODELS, repeats: int | None = None
) -> Findings:
    """The seconds of partitioning on this machine, the shortest of several runs, by
    model.
    """
    repeats = repeats or (5 if ask.quick else 50)
    rows: list[Row] = []
    for done, model in ask.each(models):
        ask.report(done, model)
        rows.append(_row(model, repeats))
    note = (
        "S_p = 4 Mb on 8 nodes of cluster 1; a plan of gradwire is made once, "
        "so partitioning "
        "takes nothing of its iterations, and these seconds are what that saves"
    )
    return Findings(tuple(rows), (small_claim(rows), *order_claims(rows)), (note,))


def _row(model: str, repeats: int) -> Row:
    profile = profile_of(model)
    cluster = OURS.cluster(RANKS)
    cut = buckets(profile_of(model))
    instance = Instance.of(profile, cluster, cut, BASIC_BYTES)
    blocks = greedy(instance).blocks
    first = {one.bucket: place for place, one in reversed(list(enumerate(blocks)))}
    place = [first[bucket] for bucket in range(len(cut))]
    ours = load("planner", "usbyte")(
        profile, cluster, basic_partition_bytes=BASIC_BYTES
    )
    other = load("planner", "bytescheduler")(
        profile, cluster, partition_bytes=BASIC_BYTES, credit=CREDIT
    )
    row: Row = {"name": model, "num_layers": len(cut)}
    for name, plan, work in (
        ("usbyte", ours, lambda: instance.blocks(place)),
        ("bytescheduler", other, lambda: even(cut)),
    ):
        taken_s = least_s(work, repeats)
        row[f"{name}_partition_s"] = taken_s
        row[f"fraction_{name}"] = taken_s / iteration_s(plan, profile, cluster)
    for name, share in zip(("usbyte", "bytescheduler"), TABLE_5[model], strict=True):
        row[f"fraction_{name}_paper"] = share
    return row


def even(cut: Sequence[Bucket]) -> list[tuple[int, int, int]]:
    """The blocks of one size that each bucket is cut into: its number, first and last
    element.
    """
    found: list[tuple[int, int, int]] = []
    for place, bucket in enumerate(cut):
        starts = block_starts(bucket, BASIC_BYTES)
        stops = (min(start + starts.step, starts.stop) for start in starts)
        found += [(place, *block) for block in zip(starts, stops, strict=True)]
    return found


def least_s(work: Callable[[], object], repeats: int) -> float:
    """The shortest seconds of several calls."""
    seconds = []
    for _ in range(repeats):
        start_s = CLOCK()
        work()
        seconds.append(CLOCK() - start_s)
    return min(seconds)


def small_claim(rows: Sequence[Row]) -> Claim:
    """Whether US-Byte's partitioning is as small a share of an iteration as the paper's
    most.
    """
    most = max(own for own, _ in TABLE_5.values())
    shares = {str(row["name"]): number(row, "fraction_usbyte") for row in rows}
    worst = max(shares, key=shares.__getitem__)
    agrees = shares[worst] <= most
    return Claim(
        f"US-Byte's partitioning takes at most {100 * most:.2f} % of an iteration",
        "section 6.3, table 5",
        f"at most {100 * shares[worst]:.2f} % ({worst})",
        agrees,
        "" if agrees else WHY_SLOW,
    )


def order_claims(rows: Sequence[Row]) -> list[Claim]:
    """Claims about which of the two takes the larger share, model by model."""
    claims = []
    for row in rows:
        ours, other = (
            number(row, f"fraction_{name}") for name in ("usbyte", "bytescheduler")
        )
        stated = TABLE_5[str(row["name"])]
        agrees = (ours - other) * (stated[0] - stated[1]) > 0
        claims.append(
            Claim(
                f"{row['name']}: US-Byte's partitioning takes "
                f"{'more' if stated[0] > stated[1] else 'less'} of an iteration than "
                f"ByteScheduler's ({100 * stated[0]:.2f} and {100 * stated[1]:.2f} %)",
                "section 6.3, table 5",
                f"{100 * ours:.3f} % and {100 * other:.3f} %",
                agrees,
                ""
                if agrees
                else "even cuts are one loop here; the paper's scheduler is another",
            )
        )
    return claims
