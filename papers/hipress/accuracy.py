"""Figure 14 of HiPress: its cost model beside what it predicts, here the simulator's
exchange.

The paper measures synchronisation on its own 16 hosts. Here the steps that training
runs are played by events on a link of the same rate, so what is compared is equations 1
and 2 with their serial steps, and the very transfers, encodes and decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradwire.exchange.by_name import by_name
from gradwire.planning.data.cluster import Cluster
from gradwire_bench.report import curves
from gradwire_lab.compress.tbq import tbq
from gradwire_lab.planning.casync_cost import CaSyncCost

from ..frame import Ask, Claim, Findings, Row
from ..one_exchange import simulate_exchange
from ..rows import mean, number
from .setting import HOSTS, LOCAL

KIB = 2**10
MIB = 2**20
SIZES = (32 * KIB, 128 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
RATE = 1 / 16
"""The compression rate of TBQ: 2 bits of 32."""
WHOLE = MIB
MANY = 64 * MIB
"""Up to the one no partitions are advised, from the other on as many as hosts."""


def figure14(
    ask: Ask, sizes: Sequence[int] = SIZES, num_hosts: int = HOSTS
) -> Findings:
    """Seconds by size: uncut by the cost model, cut by it and by the simulator; the
    advised cut.
    """
    cluster = LOCAL.cluster(num_hosts)
    rows = []
    for done, size_bytes in ask.each(sizes):
        ask.report(done, f"{size_bytes // KIB} KiB")
        rows.append(row_of(cluster, size_bytes))
    claims = (_from_size(rows), *_advice(rows, num_hosts), *_accuracy(rows))
    note = (
        "simulated exchanges cut a gradient into as many partitions as hosts, and "
        "figure 14a's uncut gradients are predicted only; curves are those of "
        "table 7, on a 1080 Ti"
    )
    return Findings(tuple(rows), claims, (note,))


def row_of(cluster: Cluster, size_bytes: int) -> Row:
    """The seconds of one gradient, each way."""
    codec = cluster.codecs["tbq"]
    cost = CaSyncCost.of(cluster, codec, is_ring=False, traits=tbq.traits)
    numel = size_bytes // 4
    hosts = cluster.num_ranks
    cuts = np.array([1.0, float(hosts)])
    plain_K = cost.plain_each_s(size_bytes, cuts)
    small_K = cost.compressed_each_s(numel, RATE * size_bytes, cuts)
    choice = cost.choose(numel, size_bytes, RATE * size_bytes)
    every_K = np.arange(1.0, 16 * hosts + 1)
    compressed_K = cost.compressed_each_s(numel, RATE * size_bytes, every_K)
    dense = by_name("none", {}, "ring")
    packed = by_name("tbq", {}, "casync_ps")
    return {
        "name": f"{size_bytes // KIB} KiB",
        "size_bytes": size_bytes,
        "plain_uncut_s": float(plain_K[0]),
        "compressed_uncut_s": float(small_K[0]),
        "plain_s": float(plain_K[1]),
        "plain_simulated_s": simulate_exchange(dense, numel, cluster).iteration_s,
        "compressed_s": float(small_K[1]),
        "compressed_simulated_s": simulate_exchange(packed, numel, cluster).iteration_s,
        "compresses": choice.is_compressed,
        "partitions": int(np.argmin(compressed_K)) + 1,
    }


def _from_size(rows: Sequence[Row]) -> Claim:
    """The size from which on compression pays where nothing is cut."""
    pays = [row for row in rows if _less(row, "compressed_uncut_s", "plain_uncut_s")]
    least = min((int(number(row, "size_bytes")) for row in pays), default=None)
    agrees = least == WHOLE
    in_words = "never" if least is None else f"from {least // KIB} KiB on"
    small = next(row for row in rows if least is None or row["size_bytes"] == least)
    why = (
        f"{small['name']} takes {1e6 * number(small, 'compressed_uncut_s'):.0f} us "
        f"compressed and {1e6 * number(small, 'plain_uncut_s'):.0f} us plain by the "
        "stated curves: the size depends on what a kernel's start costs beside a "
        "transfer's, which the paper does not print"
    )
    says = "uncut gradients gain from compression from 1 MB on"
    return Claim(says, "figure 14a", in_words, agrees, "" if agrees else why)


def _less(row: Row, one: str, other: str) -> bool:
    return number(row, one) < number(row, other)


def _advice(rows: Sequence[Row], num_hosts: int) -> list[Claim]:
    """Claims about the cuts that the cost model advises, where gradients are
    compressed.
    """
    small = [row for row in rows if number(row, "size_bytes") <= WHOLE]
    large = [row for row in rows if number(row, "size_bytes") >= MANY]
    stated = (
        ("gradients up to 1 MB are not cut", small, 1),
        (f"gradients of 64 and 128 MB are cut into {num_hosts}", large, num_hosts),
    )
    claims = []
    for says, own, wanted in stated:
        in_words = ", ".join(f"{row['name']} {row['partitions']}" for row in own)
        agrees = bool(own) and all(row["partitions"] == wanted for row in own)
        unlike = [row for row in own if row["partitions"] != wanted]
        why = (
            "the number of partitions hangs on curves that the paper does not print"
            + "".join(
                f"; {row['name']} takes "
                f"{1e6 * number(row, 'compressed_uncut_s'):.0f} us uncut and "
                f"{1e6 * number(row, 'compressed_s'):.0f} us in {num_hosts}"
                for row in unlike
            )
        )
        claims.append(
            Claim(says, "figure 14b", in_words or "none", agrees, "" if agrees else why)
        )
    return claims


def _accuracy(rows: Sequence[Row]) -> list[Claim]:
    """How far the equations are from what is played, on average over sizes; that is no
    verdict.
    """
    claims = []
    for key, equation in (("plain", 1), ("compressed", 2)):
        off = {
            str(row["name"]): number(row, f"{key}_s")
            / number(row, f"{key}_simulated_s")
            - 1
            for row in rows
        }
        found = mean([abs(one) for one in off.values()])
        worst = max(off, key=lambda name: abs(off[name]))
        why = (
            "a formula beside a simulator that counts by the same lines, not beside "
            f"measurements: most off at {worst}, by {100 * off[worst]:+.0f} %. "
            f"Equation {equation} counts every step by itself, one behind the other; "
            "the exchange encodes and decodes all chunks in one call where they are "
            "small, and beside transfers where it goes in rounds"
        )
        says = f"the cost model is accurate for {key} gradients (equation {equation})"
        in_words = f"{100 * found:.1f} % off on average"
        claims.append(Claim(says, "figure 14a", in_words, None, why))
    return claims


def draw14(rows: Sequence[Row], path: Path) -> Path:
    """Draws seconds over size: by the equations and by the simulator."""
    series = {
        label: [(number(row, "size_bytes") / MIB, number(row, key)) for row in rows]
        for label, key in (
            ("plain, equation 1", "plain_s"),
            ("plain, simulated", "plain_simulated_s"),
            ("compressed, equation 2", "compressed_s"),
            ("compressed, simulated", "compressed_simulated_s"),
        )
    }
    return curves.draw_panels(
        {"": series},
        path,
        title="Cost model and simulator",
        x_label="MiB",
        y_label="seconds",
    )
