"""The permutation and algorithm 1 in Triton, where there is no GPU under its
interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.kernels.sparse.entries import Entries, Parts
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation, places_on_gpu
from gradwire_lab.kernels.hashing import HashMemory, hash_on_gpu
from tests.each import each

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("triton_interpreted"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(entries: Entries) -> Entries:
    return Entries(
        entries.indices_K.to(DEVICE), entries.values.to(DEVICE), entries.width
    )


def on_cpu(parts: Parts) -> Parts:
    indices_K, values, width = parts.entries
    return Parts(parts.counts_W, Entries(indices_K.cpu(), values.cpu(), width))


def hashed(entries: Entries, *where: Any, **memory: Any) -> Parts:
    """Algorithm 1, whatever of it spills."""
    found = hash_on_gpu(on_device(entries), *where, HashMemory(**memory))
    return on_cpu(found.parts)


def some(
    num_units: int, count: int, width: int = 1, *, repeated: bool = False
) -> Entries:
    draw = torch.Generator().manual_seed(num_units + count)
    if repeated:
        indices_K = torch.randint(num_units, (count,), generator=draw)
    else:
        indices_K = torch.randperm(num_units, generator=draw)[:count]
    return Entries(indices_K.int(), torch.randn(count * width, generator=draw), width)


def as_sets(parts: Parts, world: int) -> list[list[tuple[Any, ...]]]:
    """Each part's entries, without their order."""
    found = []
    for rank in range(world):
        own = parts.of(rank)
        units = own.values.view(-1, own.width).tolist()
        found.append(
            sorted(
                (i, *unit)
                for i, unit in zip(own.indices_K.tolist(), units, strict=True)
            )
        )
    return found


WAYS = {
    "algorithm 1": hashed,
    "one rehash": partial(hashed, rehashes=1),
    "little parallel memory": partial(hashed, parallel=0.1),
    "serial memory overflows": partial(hashed, parallel=0.1, serial=0.0),
    "no room at all": partial(hashed, parallel=0.0, serial=0.0),
}
CASES = {
    "nothing": (100, 4, some(100, 0)),
    "one unit, one part": (1, 1, some(1, 1)),
    "more parts than units": (5, 16, some(5, 5)),
    "index 0 alone": (
        1000,
        3,
        Entries(torch.zeros(1, dtype=torch.int32), torch.ones(1)),
    ),
    "all indices": (1003, 7, some(1003, 1003)),
    "a tenth": (9_011, 8, some(9_011, 900)),
    "rows": (999, 5, some(999, 300, 3)),
    "duplicates": (300, 3, some(300, 900, repeated=True)),
    "one index often": (
        300,
        3,
        Entries(torch.full((500,), 7, dtype=torch.int32), torch.ones(500)),
    ),
}


@pytest.mark.parametrize("way", ["algorithm 1", "no room at all"])
@each("case", CASES)
def test_nothing_is_lost_and_parts_are_those_of_the_definition(
    way: str, case: str
) -> None:
    num_units, world, entries = CASES[case]
    for shuffle in (None, Permutation(num_units, seed=3)):
        agree(way, entries, num_units, world, shuffle)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    way=st.sampled_from([*WAYS]),
    indices=st.lists(st.integers(0, 49), max_size=80),
    num_units=st.integers(50, 70),
    world=st.integers(1, 17),
    shuffled=st.booleans(),
)
def test_any_list_of_entries_is_partitioned(
    way: str, indices: list[int], num_units: int, world: int, shuffled: bool
) -> None:
    values = torch.arange(len(indices), dtype=torch.float32)
    entries = Entries(torch.tensor(indices, dtype=torch.int32), values)
    agree(
        way, entries, num_units, world, Permutation(num_units, 2) if shuffled else None
    )


def agree(
    way: str, entries: Entries, num_units: int, world: int, shuffle: Permutation | None
) -> None:
    found = WAYS[way](entries, num_units, world, shuffle)
    want = partition(entries, num_units, world, shuffle)
    assert found.counts_W == want.counts_W
    assert as_sets(found, world) == as_sets(want, world)


@each("numel", [1, 2, 3, 1000, 4096, 4097, 2**31 - 1])
def test_the_permutation_has_the_same_bits(numel: int) -> None:
    draw = torch.Generator().manual_seed(1)
    indices_K = torch.randint(numel, (300,), generator=draw, dtype=torch.int64).int()
    shuffle = Permutation(numel, seed=5)
    found_K = torch.empty_like(indices_K, device=DEVICE)
    places_on_gpu(indices_K.to(DEVICE), shuffle, found_K)
    assert torch.equal(found_K.cpu(), shuffle.places(indices_K))


def test_what_overflows_is_counted() -> None:
    num_units, world = 4000, 4
    entries, shuffle = on_device(some(num_units, 2000)), Permutation(num_units, 1)
    given = (entries, num_units, world, shuffle)
    roomy = hash_on_gpu(*given, HashMemory())
    assert roomy.fallback == 0
    # half as full as there are cells, three tries
    assert 0 < roomy.serial < 0.2 * entries.num
    tight = hash_on_gpu(*given, HashMemory(parallel=1.0, serial=0.002))
    assert tight.serial == 4
    assert tight.fallback > 100
    single = hash_on_gpu(*given, HashMemory(rehashes=1))
    assert single.serial + single.fallback > roomy.serial + roomy.fallback


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gradwire_lab.kernels import hashing_device
from gradwire.kernels.sparse.permutation_device import permute

shapes = {"WORLD": 8, "BLOCK": 1024, "REHASHES": 3}
scalars = {"num_entries", "num_blocks", "length", "parallel", "serial", "last"}
# A launch makes every 1 that it is given a constant.
ones = shapes | dict.fromkeys(scalars, 1)
hashing = hashing_device.hash_entries
for kernel, fixed in ((permute, shapes), (hashing, shapes), (hashing, ones)):
    names = kernel.arg_names
    constants = {name: fixed[name] for name in names if name in fixed}
    types = {name: "i32" if name in scalars else "*i32" for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, GPUTarget("cuda", 80, 32))
    print(made.asm["ptx"].replace("\\n", " "))
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_need_not_be_there(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    variables.pop("TRITON_INTERPRET", None)
    found = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    permute, hashing, single = found.stdout.splitlines()
    for ptx in (permute, hashing, single):
        assert ".target sm_80" in ptx
        assert "ld.local" not in ptx
    assert "atom" not in permute  # its order does not depend on timing
    assert "atom.global" in hashing
    assert ".cas.b32" in hashing
    assert ".add.u32" in hashing
