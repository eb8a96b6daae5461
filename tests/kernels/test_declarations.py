"""A kernel takes and returns what its C++ declaration says, which is the one place of
its types.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from gradwire.kernels import compiler
from gradwire.kernels.libraries import libraries, load_library, source
from tests.arch.source import sources
from tests.each import each

needs_compiler = pytest.mark.skipif(
    compiler.find_compiler() is None, reason="no C++ compiler"
)

WIDE = """
#include "blocks.h"
GW_EXPORT int64_t widened(const float* values, int64_t count,
                          float factor, int threads) {
  if (values == nullptr) return -1;
  return static_cast<int64_t>(values[0] * factor) + count + threads;
}
GW_EXPORT void nothing(int threads) {}
"""


@needs_compiler
@each("name", libraries())
def test_every_exported_function_has_the_types_of_its_declaration(name: str) -> None:
    library = load_library(name)
    exports = re.findall(r"GW_EXPORT (\w+) (\w+)\(([^)]*)\)", source(name).text)
    assert exports
    for returned, function, parameters in exports:
        found = getattr(library, function)
        # which passes the number of threads
        found = getattr(found, "__wrapped__", found)
        assert (
            found.restype
            is {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "void": None}[returned]
        )
        assert len(found.argtypes) == len(parameters.split(","))
        pointers = [kind is compiler.Pointer for kind in found.argtypes]
        assert pointers == ["*" in one for one in parameters.split(",")]


@needs_compiler
def test_counts_beyond_32_bits_come_back_whole() -> None:
    headers = source(libraries()[0]).headers
    library = compiler.load_compiled(compiler.CppSource("widened", WIDE, headers))
    assert library is not None
    one = torch.tensor([2.0])
    assert library.widened(one, 2**40, 1.5) == 2**40 + 3 + torch.get_num_threads()
    assert library.widened(None, 2**40, 1.5) == -1
    assert library.nothing() is None
    with pytest.raises(TypeError, match="at least 4 arguments"):
        library.widened(one, 2**40)
    with pytest.raises(ctypes.ArgumentError):
        library.widened(one, 1.5, 1.5)


def test_no_call_states_types_of_its_own() -> None:
    stated = re.compile(r"\.(restype|argtypes)\b")
    assert [s.path for s in sources() if stated.search(s.text)] == [
        "kernels/compiler.py"
    ]
