"""The laws of what users give: a setting or a gradient works, or is refused with what to do.

What is no number, one too large for what is computed with it, a gradient that is none: each ends in
``InvalidSetting`` and never in another error, in garbage, or in memory that no machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Compressor, Exchange
from gradwire.contract.registry import examples
from gradwire.contract.spec import TensorSpec
from gradwire.errors import IncompatiblePair, InvalidSetting
from gradwire.exchange.by_name import exchange_for, pair, run_local
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.tolerance import largest
from tests.planning.profiles import measured

WHOLE = (
    *(-(2**80), -(2**63), -1, 0, 1, 2, 3, 8, 63, 64, 65, 2**16, 2**24, 2**31 - 64, 2**31 - 1),
    *(2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 64, 2**63 - 1, 2**63, 2**64 - 64, 2**64, 2**80),
    *(10**400, 10**5000),  # the second is longer than Python writes
)
REAL = (
    *(0.0, -0.0, 5e-324, 1e-300, 1e-46, 1e-40, 1e-10, 0.5, 1.0, 1.0000001, 2.5, 1e10, 3.4e38, 1e39),
    *(1e308, -1e-9, float("inf"), float("-inf"), float("nan")),
)
OTHER = (
    *(None, True, "a", b"a", (), [1], {}, 1j, int),
    *(torch.float32, torch.tensor(64), torch.ones(3)),
)
VALUES: tuple[object, ...] = (*WHOLE, *REAL, *OTHER)

MOST_BYTES = 2**28
"""Of what a rank sends of ``SPEC``: units that are filled up with zeros are its largest part."""

CLUSTER = measured(Cluster(num_ranks=8, rate_bytes_per_s=1.25e9))
SPEC = TensorSpec("gradient", 300, shapes=((10, 20), (100,)))


def exchange_of(algorithm: Any) -> Exchange:
    """An exchange that this takes part in: of a collective, with the first codec that suits it."""
    if isinstance(algorithm, Compressor | Exchange):
        return exchange_for(algorithm)
    for codec in examples("compress"):
        try:
            return pair(codec, algorithm)
        except IncompatiblePair:
            continue
    raise AssertionError(f"no compressor goes with {algorithm!r}")


Made = Callable[..., Any]
"""Makes an algorithm or an exchange of settings given by name."""


def law_setting_works_or_is_refused(make: Made, name: str, value: object) -> None:
    """One setting is ``value``; the others are what ``make`` has for them.

    What only a gradient can tell (sizes of its layers) is refused before anything is exchanged.
    """
    try:
        exchange = exchange_of(make(**{name: value}))
        states = [exchange.init(SPEC, 2) for _ in range(2)]
        sent = exchange.expected_bytes(SPEC, 2)
    except InvalidSetting as refused:
        _check_named(name, refused)
        return
    except Exception as error:
        raise AssertionError(f"{name} ended in {type(error).__name__}: {error}") from error
    assert sent is None or max(sent) <= MOST_BYTES, f"{max(sent)} bytes of 300 elements"
    grads = [torch.randn(300, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    try:
        results = run_local(exchange, grads, states)
    except Exception as error:
        raise AssertionError(f"{name} was accepted, and ended in {error!r}") from error
    (mean_N, one_N, _), (_, other_N, _) = results
    assert bool(mean_N.isfinite().all()), "the mean of finite gradients is not finite"
    off = largest(one_N + other_N - 2 * mean_N)
    assert off <= 0.01 * max(1.0, largest(one_N, other_N)), f"{off:.3g} of what was sent is lost"


def _check_named(name: str, refused: InvalidSetting) -> None:
    assert name in str(refused), f"refused without a word of {name}: {refused}"


def law_planner_takes_or_refuses(planner: Any, profile: Profile, name: str, value: object) -> None:
    """A planner gives a plan that can be priced, or refuses the setting."""
    try:
        iteration_s(plan(planner, profile, CLUSTER, **{name: value}), profile, CLUSTER)
    except InvalidSetting as refused:
        _check_named(name, refused)
    except Exception as error:
        raise AssertionError(f"{name} ended in {type(error).__name__}: {error}") from error


# ---- gradients ---------------------------------------------------------------------------------


def _sparse(dense: Tensor) -> Tensor:
    return dense.to_sparse()


NO_GRADIENTS: dict[str, object] = {
    "complex": torch.randn(200, dtype=torch.complex64),
    "complex double": torch.randn(200, dtype=torch.complex128),
    "whole numbers": torch.arange(200),
    "bytes": torch.ones(200, dtype=torch.uint8),
    "conditions": torch.ones(200, dtype=torch.bool),
    "8-bit floats": torch.ones(200).to(torch.float8_e4m3fn),
    "without values": torch.empty(200, device="meta"),
    "sparse": _sparse(torch.eye(20)[3]),
    "rows": torch.randn(10, 20),
    "one number": torch.tensor(3.0),
    "part of a graph": torch.randn(200, requires_grad=True),
    "computed in a graph": 2 * torch.randn(200, requires_grad=True),
    "a list": [1.0, 2.0],
    "nothing": None,
}
"""What is given for a gradient, and is none that can be exchanged."""

STRANGE = {
    "every second element": torch.randn(400)[::2],
    "one element over and over": torch.randn(1).expand(200),
    "a column": torch.randn(200, 3)[:, 1],
    "the imaginary part": torch.randn(200, dtype=torch.complex64).conj().imag,
    "inside another": torch.randn(300)[50:250],
    "empty": torch.zeros(0),
    "detached": torch.randn(200, requires_grad=True).detach(),
}
"""Gradients that lie oddly in memory, and are as good as any."""


def law_what_is_no_gradient_is_refused(algorithm: Any, given: Any) -> None:
    """By encode, with and without a residual, and by ``run_local``."""
    attempts = [lambda: run_local(exchange_of(algorithm), [given, given])]
    if isinstance(algorithm, Compressor):
        state = algorithm.init(TensorSpec("gradient", 200))
        attempts += [
            lambda: algorithm.encode(state, given),
            lambda: algorithm.encode(state, given, residual_N=torch.zeros(200)),
            lambda: algorithm.encode_many([state], [given]),
        ]
    for attempt in attempts:
        try:
            attempt()
        except InvalidSetting as refused:
            _check_named("gradient", refused)
            continue
        except Exception as error:
            raise AssertionError(f"ended in {type(error).__name__}: {error}") from error
        raise AssertionError("taken for a gradient")


def law_strides_do_not_matter(algorithm: Any, grad_N: Tensor) -> None:
    """A gradient that lies oddly in memory has the mean of a contiguous one."""
    exchange = exchange_of(algorithm)
    (odd, _, _), (even, _, _) = (
        run_local(exchange, [g, g])[0] for g in (grad_N, grad_N.clone().resolve_neg().contiguous())
    )
    assert torch.equal(odd, even), "the mean depends on how the gradient lies in memory"
