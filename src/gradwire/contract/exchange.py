"""Exchange: one gradient's way from this rank's values to the mean over ranks."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar

from torch import Tensor

from .compressor import KeywordSettings, Layout, Residual, State, Traits
from .member import Member
from .spec import TensorSpec, clear_not_finite
from .verbs import Compute, Steps

Result = tuple[Tensor, Tensor, State]
"""(mean_N in the gradient's dtype, contributed_N in the working dtype, new state)."""
Copies = Generator[tuple[Tensor, ...], tuple[Tensor, ...], None]
"""A generator of two copies, from a device to the host and back: ``EncodesTensors``."""


_UNDECLARED = Traits(layout=Layout.DENSE, exact_size=False)


class Exchange(KeywordSettings, ABC):
    """Averages one flat gradient over ranks.

    Subclasses write ``init`` and ``synchronise``, a generator, and declare their
    traits. A subclass without kept buffers may write ``run`` in place of
    ``synchronise``.
    """

    traits: ClassVar[Traits | None] = None
    """The traits of an algorithm in ``compress/`` that is an exchange; else None."""

    decides_by: ClassVar[tuple[str, ...]] = ()
    """State fields, beside whole numbers, by which ranks decide what they send.

    They have the same values on all ranks, and a checkpoint whose ranks differ is
    refused.
    """

    @property
    def declared(self) -> Traits:
        """The promises of a pair, or of all exchanges around another together.

        ``exact_size`` says whether the bytes of a step follow from the gradient's spec
        alone.
        """
        return _UNDECLARED if self.traits is None else self.traits

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host if it has verbs among them, else 1."""
        return 1

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.run is Exchange.run and cls.synchronise is Exchange.synchronise:
            raise TypeError(
                f"{cls.__name__} defines neither run nor synchronise; define one"
            )

    @abstractmethod
    def init(self, spec: TensorSpec, world: int) -> State:
        """The state of rank ``spec.rank`` before the first step."""

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        """The short form of ``synchronise``.

        Args:
            rank: This rank.
            world: The number of ranks, W.
            state: The state that ``init`` or the last step returned.
            grad_N: This rank's gradient. It is not written.

        Returns:
            The mean, the part of this rank's gradient that is in the mean, and the new
            state. The sum of these parts over ranks is W times the mean.
        """
        raise NotImplementedError

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        """One step: leaves the mean over ranks in ``out_N``.

        The default calls ``run`` with the sum in the gradient's dtype, and keeps the
        rounding error in the residual. An exchange around another one calls
        ``me.through``.

        Args:
            me: This rank, the number of ranks, and buffers that are kept from step to
                step.
            state: The state that ``init`` or the last step returned.
            grad_N: This rank's gradient.
            out_N: The mean; may be ``grad_N`` itself.
            residual_N: In the working dtype. The sum of gradient and residual is
                exchanged. The part that did not arrive is left here, and is finite for
                every gradient.

        Returns:
            The new state.
        """
        sent_N = grad_N
        if residual_N is not None:
            pending_N = residual_N

            def add() -> Tensor:
                return pending_N.add_(grad_N).to(grad_N.dtype, copy=True)

            sent_N = yield Compute("accumulate", add, grad_N.numel())
        mean_N, contributed_N, state = yield from self.run(
            me.rank, me.world, state, sent_N
        )

        def finish() -> None:
            out_N.copy_(mean_N)
            if residual_N is not None:
                residual_N.sub_(contributed_N)
                clear_not_finite(residual_N)

        yield Compute("finish", finish, grad_N.numel())
        return state


class EncodesTensors(ABC):
    """An exchange that can encode tensors of a message before the others are there."""

    @abstractmethod
    def apart(self, spec: TensorSpec) -> tuple[int, ...]:
        """Places of the tensors in a message that it can encode each by itself."""

    @abstractmethod
    def encode_ahead(
        self,
        me: Member,
        state: State,
        place: int,
        grad_N: Tensor,
        residual_N: Residual = None,
    ) -> None:
        """Encodes one tensor of ``apart`` before the others of its message are there.

        All is as in ``synchronise``, of the whole message, but only the elements of the
        tensor at ``place`` count. What was made of it stays in ``me.ahead`` under its
        place until ``synchronise`` of the same step, with the same state, takes it from
        there and encodes what is left. There are two ranks or more. Several threads may
        call it at once, each for another tensor.
        """

    @abstractmethod
    def encode_on_host(
        self,
        me: Member,
        state: State,
        place: int,
        grad_N: Tensor,
        residual_N: Residual = None,
    ) -> Copies:
        """``encode_ahead`` of a tensor on a device, by the host.

        The steps yield tensors of the device and are resumed with copies of them in
        host memory, which it may overwrite. Then it yields what it has made of these,
        and is resumed with copies on the device. What it does before the first copy and
        behind the second is launched on the device. All of the state stays where it is.
        """


def synchronise_alone(
    grad_N: Tensor, out_N: Tensor, residual_N: Residual
) -> Steps[None]:
    """``Exchange.synchronise`` of a single rank: nothing is sent, so nothing is lost.

    Plain training, bit for bit; where more ranks have left a residual, that arrives
    now, but for what a 16-bit gradient cannot hold beside it.
    """

    def decode() -> None:
        # In a run without data there is nothing to look at.
        if residual_N is None or residual_N.is_meta or not bool(residual_N.any()):
            out_N.copy_(grad_N)
        else:
            out_N.copy_(residual_N.add_(grad_N))
            residual_N.sub_(out_N)
            clear_not_finite(residual_N)

    yield Compute("decode", decode, grad_N.numel())
