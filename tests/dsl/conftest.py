"""Where there is no GPU, Triton's own interpreter runs its kernels, on the CPU.

What is defined in triton's language, by itself and by ``dsl/gpu/device.py``, is interpreted only
if it was imported so: before anything else here imports it. The variable is not left behind, for
what other tests start.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import gradwire.dsl.gpu.device  # noqa: F401
