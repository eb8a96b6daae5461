"""The law of compressors written in the language: what is compiled does what is
defined.
"""

import torch
from torch import Tensor

from gradwire.contract.spec import working_dtype
from gradwire.dsl.program import Program
from gradwire.kernels.compiler import reference_only

from .payloads import content, encoded
from .tolerance import must, same_bits


def law_compiled_as_interpreted(codec: Program, grad_N: Tensor) -> bool:
    """C++ gives the interpreter's bits: payload, residual and what is decoded.

    To do: report it to gradwire together with the program: the fault is in what is made
    of it.
    """
    if codec.kernels().built.library() is None:
        return False
    compiled = _outcome(codec, grad_N)
    with reference_only():
        interpreted = _outcome(codec, grad_N)
    for name, value in compiled.items():
        must(
            same_bits(value, interpreted[name]),
            f"C++ and the interpreter give another {name}",
        )
    return True


def _outcome(codec: Program, grad_N: Tensor) -> dict[str, Tensor]:
    residual_N = torch.ones(grad_N.numel(), dtype=working_dtype(grad_N.dtype))
    payload = encoded(codec, grad_N, residual_N)
    decoded_N = codec.decode(payload, torch.empty_like(residual_N))
    return {
        "payload": content(payload),
        "residual": residual_N,
        "decoded gradient": decoded_N.nan_to_num(nan=1e38),  # signs of NaN differ
    }


LAWS = (law_compiled_as_interpreted,)
