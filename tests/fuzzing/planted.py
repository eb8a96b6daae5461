"""A fault on purpose: a kernel that believes the places in a payload, which fuzzing
must find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from gradwire.kernels.compiler import CppSource, load_compiled
from tests.fuzzing.mutations import mutated
from tests.fuzzing.payloads import tensor_of

SOURCE = CppSource(
    "unchecked",
    """
#include <cstdint>
#define GW_EXPORT extern "C" __attribute__((visibility("default")))
GW_EXPORT void put(const int32_t* places, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[places[i]] += 1.0f;
}
""",
    Path(__file__).parent,
)


def unchecked(rng: random.Random) -> None:
    """Adds 1 at places that came, wherever these are."""
    places_K = torch.arange(0, 64, 4, dtype=torch.int32)
    came = tensor_of(mutated(rng, bytes(places_K.view(torch.uint8).numpy()), (64,)))
    library, out_N = load_compiled(SOURCE), torch.zeros(64)
    assert library is not None
    library.put(came.data_ptr(), places_K.numel(), out_N.data_ptr())


TARGETS: dict[str, Callable[[random.Random], None]] = {"unchecked": unchecked}
