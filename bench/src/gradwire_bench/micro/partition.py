"""The seconds in which ZEN partitions the entries of one rank (figure 16)."""

from functools import partial

from gradwire.cli.report.table import Row
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_bench.figures import quartiles
from gradwire_bench.micro.kernel import TimedCall, seconds_in_turn
from gradwire_lab.kernels.hashing import hash_partition


def partition_forms(entries: Entries, numel: int, world: int, rounds: int) -> list[Row]:
    """The paper's figure 16: one tensor's partition, without its transfer.

    There is a row for each form on a GPU, and for the C++ on a CPU.
    """
    device = entries.indices_K.device
    where = (entries, numel, world, Permutation(numel, seed=1))
    forms: dict[str, TimedCall] = {"cpu": partial(partition, *where)}
    if device.type == "cuda":
        forms = {
            "sort by place": partial(partition, *where),
            "algorithm 1": partial(hash_partition, *where),
        }
    rows = [
        {"name": name, **quartiles("kernel_s", taken), "num_entries": entries.num}
        for name, taken in seconds_in_turn(forms, rounds, device).items()
    ]
    if device.type == "cuda":
        hashed = hash_partition(*where)
        rows[1] |= {"serial": hashed.serial, "fallback": hashed.fallback}
    return rows
