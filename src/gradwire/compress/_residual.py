"""The edges of every encode: gradients and residuals of all compressors."""

from torch import Tensor

from ..contract import Compressor, Memory, Residual, State
from ..contract.payload import Payload
from ..contract.spec import clear_not_finite, working_dtype


class EncodesMany(Compressor):
    """A compressor that writes ``encode_many``: one gradient is encoded as several."""

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        (encoded,) = self.encode_many((state,), (grad_N,), (residual_N,), (buffer,))
        return encoded


def as_working(grad_N: Tensor) -> Tensor:
    """The gradient, contiguous and in its working dtype.

    Itself where it is that already.
    """
    return grad_N.to(working_dtype(grad_N.dtype)).contiguous()


def subtract_sent(residual_N: Tensor, decoded_N: Tensor) -> None:
    """Takes what was sent off the residual; what is not finite never stays in it."""
    residual_N.sub_(decoded_N)
    clear_not_finite(residual_N)
