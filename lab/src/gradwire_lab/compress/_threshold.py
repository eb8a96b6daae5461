"""Sending what reaches a threshold: all of the threshold family but how the threshold
is found.

A file of that family says which threshold and is ``Reaching`` (one that is given) or
``Estimated`` (one that is found from the magnitudes of this step, for a density).
Letters as in ``_coo``.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from gradwire.compress._coo import (
    Coo,
    check_addressable,
    coo_format,
    round_to_wire,
    share_of,
)
from gradwire.compress._residual import as_working
from gradwire.contract import Layout, Memory, Residual, State, Traits
from gradwire.contract.bounds import check_number, check_share
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, spec_of

from ._magnitudes import Magnitudes
from ._reaching import reaching


def check_cap(setting: str, value: object) -> None:
    """Refuses what is no multiple of a density."""
    accepted = "a multiple of the density, from 1 to 1e9"
    check_number(setting, value, accepted, "leave it at 2", 1, 1e9)


_CAP = 2.0


@dataclass(frozen=True, kw_only=True)
class Reaching(Coo):
    """Lists the elements of at least a threshold's magnitude, of which there may be any
    number.

    Zeros are never sent, and what is not finite always is. Beyond ``most`` elements the
    largest are selected exactly.
    """

    @abstractmethod
    def most(self, numel: int) -> int:
        """The most that is sent of ``numel`` elements."""

    def format(self, spec: TensorSpec) -> Format:
        check_addressable(type(self).__name__, spec)
        return coo_format(self.most(spec.numel))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        num_kept, rest = divmod(size_bytes, coo_format(1).size_bytes)
        if rest or not 0 <= num_kept <= self.most(spec.numel):
            raise self.no_such_size(spec, size_bytes)
        return coo_format(num_kept)

    def listed(
        self,
        grad_N: Tensor | None,
        threshold: float,
        residual_N: Residual,
        buffer: Memory,
    ) -> Payload:
        """The payload of what reaches ``threshold``; operands as ``reaching`` has
        them.
        """
        whole_N = residual_N if grad_N is None else grad_N
        assert whole_N is not None
        made: list[tuple[Payload, Tensor]] = []

        def room(count: int) -> tuple[Tensor, Tensor]:
            form = coo_format(count)
            front = None
            if buffer is not None:
                front = buffer[: form.size_bytes]
            payload = Payload.empty(form, front, whole_N.device)
            values_K = payload["values"]
            if values_K.dtype != whole_N.dtype:
                values_K = torch.empty(
                    count, dtype=whole_N.dtype, device=whole_N.device
                )
            made.append((payload, values_K))
            return payload["indices"], values_K

        reaching(grad_N, threshold, self.most(whole_N.numel()), room, residual_N)
        payload, exact_K = made[0]
        if exact_K.dtype != payload["values"].dtype:
            round_to_wire(payload["values"], exact_K, payload["indices"], residual_N)
        return payload


def estimating(*, least: float) -> Traits:
    """The traits of an ``Estimated`` that sends no less than ``least`` times the
    density.
    """
    return Traits(
        layout=Layout.SPARSE,
        exact_size=False,
        nonexpansive=True,
        error_feedback=True,
        density_range=(least, _CAP),
    )


@dataclass(frozen=True, kw_only=True)
class Estimated(Reaching):
    """Finds a threshold that about ``density`` of the elements reach.

    How many reach it is counted: one at which that is outside ``Traits.density_range``
    gives way to the one nearest to the density. Never more than ``cap`` times the
    density is sent.
    """

    density: float = 0.01
    cap: float = _CAP

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_share(f"{name} density", self.density)
        check_cap(f"{name} cap", self.cap)
        if self.cap != _CAP:
            least, _ = self._range
            stated = replace(self.traits, density_range=(least, float(self.cap)))
            object.__setattr__(self, "traits", stated)

    @property
    def _range(self) -> tuple[float, float]:
        assert self.traits.density_range is not None
        return self.traits.density_range

    @abstractmethod
    def threshold(self, seen: Magnitudes, num_asked: int) -> float:
        """The magnitude from which on elements are sent; there are more than
        ``num_asked``.
        """

    def most(self, numel: int) -> int:
        return share_of(self.cap * self.density, numel)

    def typical(self, spec: TensorSpec) -> Format:
        return coo_format(share_of(self.density, spec.numel))

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        check_addressable(type(self).__name__, spec_of(grad_N))
        whole_N = as_working(grad_N)
        seen = Magnitudes.of(whole_N, residual_N)
        num_asked = share_of(self.density, grad_N.numel())
        # what sends all elements but zeros, where they are no more than asked for
        threshold = 0.0
        if num_asked < seen.num_elements:
            least, most = (factor * num_asked for factor in self._range)
            threshold = seen.edge_within(
                self.threshold(seen, num_asked), num_asked, least, most
            )
        # With a residual, counting has left the sum there: the gradient is not read
        # again.
        fresh_N = whole_N if residual_N is None else None
        return self.listed(fresh_N, threshold, residual_N, buffer), state


def nearest(seen: Magnitudes, thresholds: Iterable[float], num_asked: int) -> float:
    """The threshold that most nearly ``num_asked`` elements reach, by the ratio of the
    counts.

    Among equally near ones it is the first.
    """
    return min(thresholds, key=lambda t: abs(log(seen.num_reaching(t) / num_asked)))
