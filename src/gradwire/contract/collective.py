"""The contract of collectives, and their needs of a compressor."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from .compressor import Compressor, KeywordSettings, Layout, Residual, State, Traits
from .member import Member
from .spec import TensorSpec
from .verbs import Steps


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The traits that a collective asks of a compressor.

    ``()`` and ``False`` ask nothing.
    """

    additive: bool = False
    exact_size: bool = False
    exact_size_of_scales: bool = False
    """An exact size, but where each element has its own value in the payload."""
    layouts: tuple[Layout, ...] = ()

    def refusal(self, traits: Traits) -> str | None:
        """Why a compressor of these traits cannot be used, or None if it can."""
        if self.additive and not traits.additive and traits.layout is Layout.SPARSE:
            return (
                "it sums payloads entry by entry, and here each rank takes its own "
                "elements, so entries of different elements would be added up (there "
                "is no shared support)"
            )
        if self.additive and not traits.additive:
            return "it sums payloads on the way, and these payloads cannot be summed"
        if self.exact_size and not traits.exact_size:
            return (
                "it cuts messages by size beforehand, and these payloads vary in size"
            )
        if self.exact_size_of_scales and traits.shared_scale and not traits.exact_size:
            return (
                "it encodes a sum again at every rank, and payloads that vary in size "
                "and share a scale make sums larger from rank to rank"
            )
        if self.layouts and traits.layout not in self.layouts:
            needed = " or ".join(layout.value for layout in self.layouts)
            return (
                f"it needs payloads that are {needed}, and these are "
                f"{traits.layout.value}"
            )
        return None


class Dimensions(NamedTuple):
    """The features that tell sparse schemes apart.

    ZEN (OSDI 2025), section 2.2 and table 3, has them.
    """

    communication: Literal["ring", "hierarchy", "point-to-point"]
    aggregation: Literal["one-shot", "incremental"]
    """Payloads are summed after all have arrived, or at every stage on the way."""
    partition: Literal["centralization", "parallelism"]
    """Gradients travel whole, or in parts that are aggregated in different places."""
    balance: Literal["balanced", "imbalanced"] | None
    """Parts carry equally much, or may not; None where there are no parts."""


class Collective(KeywordSettings, ABC):
    """Combines payloads among ranks. Concrete ones are frozen keyword-only dataclasses.

    >>> from gradwire.collective.ring import ring
    >>> isinstance(ring(), Collective)
    True
    """

    needs: ClassVar[Needs]
    dimensions: ClassVar[Dimensions | None] = None
    """The features of a scheme for sparse payloads; None for any other collective."""
    exact_size: ClassVar[bool] = True
    """True: the bytes follow from the sizes of payloads.

    False: also from the selected elements.
    """
    encodes_sums: ClassVar[bool] = False
    """Every rank encodes a partial sum again, or rounds it to the payload's dtype. An
    encoder that makes vectors larger would multiply them from rank to rank, so ``pair``
    gives ``codec.for_sums()`` to the collective.
    """
    carries_rows: ClassVar[bool] = False
    """It can exchange row-sparse gradients. A row of any rank must be in the mean, even
    a row of zeros. A collective that makes gradients dense, or counts in other units,
    cannot do so.
    """

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> State:
        """State before the first step.

        Args:
            codec: The compressor.
            spec: The gradient's spec.
            world: The number of ranks.

        Returns:
            The state. Default: the codec's.
        """
        return codec.init(spec)

    @abstractmethod
    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        """Leaves the mean over ranks in ``out_N``.

        Args:
            codec: Encodes and decodes.
            me: This rank, the number of ranks, and buffers that are kept.
            state: The state that ``init`` or the last ``run`` returned.
            grad_N: This rank's gradient.
            out_N: The mean; may be ``grad_N`` itself.
            residual_N: In the working dtype. This rank contributes the sum of gradient
                and residual. The part that is not in the mean is left here, with the
                loss of sums that this rank encoded again.

        Returns:
            The new state.
        """
