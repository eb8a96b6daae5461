"""Settings that must be above 0 in float32."""

import torch

from gradwire.contract.bounds import check_number

_FLOAT32 = torch.finfo(torch.float32)


def check_positive(what: str, value: object, remedy: str) -> None:
    """Refuses all but numbers above 0 in float32: others would be 0 or infinite."""
    accepted = (
        f"a finite number above 0, in float32 {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}"
    )
    check_number(what, value, accepted, remedy, _FLOAT32.tiny, _FLOAT32.max)
