"""Every setting of every algorithm, and every gradient, works or is refused; the laws
bite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.compress.none import none
from gradwire.compress.nonzero import nonzero
from gradwire.compress.topk import topk
from gradwire.contract import Compressor, Exchange
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.registry import examples, load, names
from gradwire.contract.spec import TensorSpec
from gradwire.errors import IncompatiblePair, InvalidSetting
from gradwire.exchange.by_name import exchange_for, pair, run_local
from gradwire.exchange.without_data import expected_bytes
from gradwire.kernels.compiler import reference_only
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan
from gradwire.planning.planner_settings import settings_of
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.laws.tolerance import largest
from gradwire_lab.planning.tune import tune
from tests.each import by_file, each
from tests.laws.cases import name_of
from tests.planning.profiles import measured

# ---- laws ----------------------------------------------------------------------------

WHOLE = (
    *(
        -(2**80),
        -(2**63),
        -1,
        0,
        1,
        2,
        3,
        8,
        63,
        64,
        65,
        2**16,
        2**24,
        2**31 - 64,
        2**31 - 1,
    ),
    *(
        2**31,
        2**32 - 1,
        2**32,
        2**53,
        2**63 - 64,
        2**63 - 1,
        2**63,
        2**64 - 64,
        2**64,
        2**80,
    ),
    *(10**400, 10**5000),  # the second is longer than Python writes
)
REAL = (
    *(
        0.0,
        -0.0,
        5e-324,
        1e-300,
        1e-46,
        1e-40,
        1e-10,
        0.5,
        1.0,
        1.0000001,
        2.5,
        1e10,
        3.4e38,
        1e39,
    ),
    *(1e308, -1e-9, float("inf"), float("-inf"), float("nan")),
)
OTHER = (
    *(None, True, "a", b"a", (), [1], {}, 1j, int),
    *(torch.float32, torch.tensor(64), torch.ones(3)),
)
VALUES: tuple[object, ...] = (*WHOLE, *REAL, *OTHER)

MOST_BYTES = 2**28
"""Of what a rank sends of ``SPEC``: units that are filled up with zeros are its largest
part.
"""

CLUSTER = measured(Cluster(num_ranks=8, rate_bytes_per_s=1.25e9))
SPEC = TensorSpec("gradient", 300, shapes=((10, 20), (100,)))


def exchange_of(algorithm: Any) -> Exchange:
    """An exchange that this takes part in: of a collective, with the first codec that
    suits it.
    """
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

    What only a gradient can tell (sizes of its layers) is refused before anything is
    exchanged.
    """
    try:
        exchange = exchange_of(make(**{name: value}))
        states = [exchange.init(SPEC, 2) for _ in range(2)]
        sent = expected_bytes(exchange, SPEC, 2)
    except InvalidSetting as refused:
        _check_named(name, refused)
        return
    except Exception as error:
        raise AssertionError(
            f"{name} ended in {type(error).__name__}: {error}"
        ) from error
    assert sent is None or max(sent) <= MOST_BYTES, f"{max(sent)} bytes of 300 elements"
    grads = [
        torch.randn(300, generator=torch.Generator().manual_seed(rank))
        for rank in (0, 1)
    ]
    try:
        results = run_local(exchange, grads, states)
    except Exception as error:
        raise AssertionError(f"{name} was accepted, and ended in {error!r}") from error
    (mean_N, one_N, _), (_, other_N, _) = results
    assert bool(mean_N.isfinite().all()), "the mean of finite gradients is not finite"
    # a server's gradient, the last rank's, is in no mean
    serves = getattr(getattr(exchange, "collective", None), "servers", None)
    total_N = one_N if serves else (one_N + other_N) / 2
    off = largest(2 * (total_N - mean_N))
    assert off <= 0.01 * max(1.0, largest(one_N, other_N)), (
        f"{off:.3g} of what was sent is lost"
    )


def _check_named(name: str, refused: InvalidSetting) -> None:
    assert name in str(refused), f"refused without a word of {name}: {refused}"


def law_planner_takes_or_refuses(
    planner: Any, profile: Profile, name: str, value: object
) -> None:
    """A planner gives a plan that can be priced, or refuses the setting."""
    try:
        iteration_s(plan(planner, profile, CLUSTER, **{name: value}), profile, CLUSTER)
    except InvalidSetting as refused:
        _check_named(name, refused)
    except Exception as error:
        raise AssertionError(
            f"{name} ended in {type(error).__name__}: {error}"
        ) from error


# ---- gradients -----------------------------------------------------------------------


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
        run_local(exchange, [g, g])[0]
        for g in (grad_N, grad_N.clone().resolve_neg().contiguous())
    )
    assert torch.equal(odd, even), "the mean depends on how the gradient lies in memory"


# ---- deliberately wrong ones ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class believes_any_number(none):
    """Computes with a setting that may be none."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", float(self.factor))


@dataclass(frozen=True, kw_only=True)
class refuses_too_late(none):
    """Accepts what it refuses when it is to be used."""

    level: int = 1

    def encode(self, state: Any, grad_N: Tensor, **given: Any) -> Any:
        if not isinstance(self.level, int) or self.level > 2**31:
            raise InvalidSetting("level must be below 2**31")
        return super().encode(state, grad_N, **given)


@dataclass(frozen=True, kw_only=True)
class refuses_without_a_word(none):
    """Does not say which setting it refuses."""

    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.level, int):
            raise InvalidSetting("this cannot be")


@dataclass(frozen=True, kw_only=True)
class takes_any_width(nonzero):
    """Fills one short row up to any length."""

    def __post_init__(self) -> None:
        if (
            not isinstance(self.width, int)
            or isinstance(self.width, bool)
            or self.width < 1
        ):
            raise InvalidSetting("width must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class overflows(none):
    """Decodes garbage where its setting is large."""

    gain: int = 1

    def is_decoded(self, *, scale: float) -> bool:
        return False

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        is_large = isinstance(self.gain, int) and self.gain > 2**63
        return super().decode(payload, out_N, scale=float("nan") if is_large else scale)


class takes_anything(topk):
    """Reads the real part of whatever it is given, as float32."""

    def format(self, spec: TensorSpec) -> Format:
        return Format(
            (Field("indices", torch.int32, 0), Field("values", torch.float32, 0))
        )

    def encode(self, state: Any, grad_N: Any, **given: Any) -> Any:
        return Payload.empty(self.format(TensorSpec("", 0))), state


class reads_memory(none):
    """Reads a gradient from its first element on, whatever its strides."""

    def encode(self, state: Any, grad_N: Tensor, **given: Any) -> Any:
        plain_N = grad_N
        if grad_N.numel() > 1 and grad_N.stride(0) > 1:
            plain_N = torch.as_strided(grad_N, grad_N.shape, (1,))
        return super().encode(state, plain_N, **given)


# ---- tests ---------------------------------------------------------------------------

ALGORITHMS = (*examples("compress"), *examples("collective"))
FIRST = tuple({type(made): made for made in reversed(ALGORITHMS)}.values())
"""One of each kind: what is tried for a setting replaces what the others differ in."""
WRAPPERS = {
    "momentum": partial(gw.with_momentum_correction, gw.compress.topk()),
    "max_norm": partial(gw.with_clipping, gw.compress.topk()),
    "steps_per_stage": partial(gw.with_density_warmup, gw.compress.topk()),
    "steps": partial(gw.with_warmup, gw.compress.onebit()),
    "every": partial(gw.adapt, gw.compress.topk()),
    "error": partial(gw.adapt, gw.compress.topk()),
    "decay": partial(gw.with_decoupled_momentum, gw.compress.demo()),
    "densities": partial(gw.with_density_warmup, gw.compress.topk(), steps_per_stage=5),
    "num_steps": partial(gw.with_measured_scheme, gw.compress.topk()),
    "width": partial(gw.with_natural_sparsity, gw.compress.topk()),
    "warmup_steps": gw.deep_gradient_compression,
    "density": partial(gw.deep_gradient_compression, warmup_steps=0),
    "clip_norm": partial(gw.deep_gradient_compression, warmup_steps=0),
}
"""What makes an exchange around another one, by a setting of it."""

PLANNERS = [
    (name, setting)
    for name in names("planner")
    for setting in settings_of(load("planner", name)) or ()
]
SMALL = profile_of(([64, 9], 0.5, 0.25), ([], 0.125, 0.125), ([300], 0.25, 0.5))


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Each value of a setting is another program: to compile them all would take
    minutes.
    """
    with reference_only():
        yield


@pytest.mark.usefixtures("interpreted")
@by_file(FIRST)
def test_any_setting_works_or_is_refused(
    subtests: pytest.Subtests, places: list[int]
) -> None:
    for made in (FIRST[place] for place in places):
        for turn, setting in enumerate(
            (field.name for field in fields(made) if field.init), 1
        ):
            with subtests.test(setting):
                law = partial(
                    law_setting_works_or_is_refused, partial(replace, made), setting
                )
                for_some_values(law, places[0] + turn)


@pytest.mark.usefixtures("interpreted")
@each("setting", WRAPPERS)
def test_any_setting_of_a_wrapper_works_or_is_refused(setting: str) -> None:
    law = partial(law_setting_works_or_is_refused, WRAPPERS[setting], setting)
    for_some_values(law, [*WRAPPERS].index(setting))


@each("place", range(len(PLANNERS)), ids=lambda at: "-".join(PLANNERS[at]))
def test_any_setting_of_a_planner_gives_a_plan_or_is_refused(place: int) -> None:
    """Every second value for a small model, every ninth for a large one; others by
    turns.
    """
    planner, setting = PLANNERS[place]
    for value in VALUES[place % 2 :: 2]:
        law_planner_takes_or_refuses(planner, SMALL, setting, value)
    for value in VALUES[place % 9 :: 9]:
        law_planner_takes_or_refuses(planner, catalogue.load("vgg16"), setting, value)


@each("setting", ["trials", "seed"])
def test_any_setting_of_a_search_works_or_is_refused(setting: str) -> None:
    def searched(profile: Profile, cluster: Cluster, **settings: Any) -> Plan:
        return tune("ddp", profile, cluster, **{"trials": 2, **settings})

    for value in VALUES[setting == "seed" :: 2]:
        if setting == "seed" or not (isinstance(value, int) and 64 < value < 2**20):
            law_planner_takes_or_refuses(searched, SMALL, setting, value)


def for_some_values(law: Callable[[object], None], turn: int) -> None:
    """The law with every second extreme of everything, by turns, and with a number
    between.
    """
    for value in (*VALUES[turn % 2 :: 2], 4 + 37 * turn % 300):
        law(value)


@each("name", ["adacomp", "threelc", "int8"])
def test_the_longest_block_compiles_and_works(name: str) -> None:
    """Of those the first ended the process beyond it, the second decoded garbage."""
    (made,) = (one for one in FIRST if type(one).__name__ == name)
    law_setting_works_or_is_refused(partial(replace, made), "block", 2**31 - 64)


@each("algorithm", examples("compress"), ids=name_of)
def test_what_is_no_gradient_is_refused(algorithm: Any) -> None:
    for given_ in NO_GRADIENTS.values():
        law_what_is_no_gradient_is_refused(algorithm, given_)


@each("algorithm", ALGORITHMS, ids=name_of)
def test_strides_do_not_matter(algorithm: Any) -> None:
    for grad_N in [*STRANGE.values()][ALGORITHMS.index(algorithm) % 2 :: 2]:
        law_strides_do_not_matter(algorithm, grad_N)


@each(
    "law, specimen, given_",
    [
        (law_setting_works_or_is_refused, believes_any_number, ("factor", "a")),
        (law_setting_works_or_is_refused, believes_any_number, ("factor", 10**400)),
        (law_setting_works_or_is_refused, refuses_too_late, ("level", 2**40)),
        (law_setting_works_or_is_refused, refuses_without_a_word, ("level", None)),
        (law_setting_works_or_is_refused, takes_any_width, ("width", 2**40)),
        (law_setting_works_or_is_refused, overflows, ("gain", 2**80)),
        (law_what_is_no_gradient_is_refused, takes_anything(), ("complex",)),
        (law_what_is_no_gradient_is_refused, takes_anything(), ("part of a graph",)),
        (law_strides_do_not_matter, reads_memory(), ("every second element",)),
    ],
    ids=name_of,
)
def test_laws_of_inputs_bite(
    law: Callable[..., None], specimen: Any, given_: Any
) -> None:
    named: dict[str, Any] = {**NO_GRADIENTS, **STRANGE}
    with pytest.raises(AssertionError, match=r"\w"):
        law(specimen, *(named[given_[0]],) if given_[0] in named else given_)


def test_what_the_broken_are_made_of_is_sound() -> None:
    for make, setting, value in (
        (believes_any_number, "factor", 2),
        (refuses_too_late, "level", 7),
        (refuses_without_a_word, "level", 7),
        (takes_any_width, "width", 7),
        (overflows, "gain", 7),
    ):
        law_setting_works_or_is_refused(make, setting, value)
    law_strides_do_not_matter(reads_memory(), torch.ones(20))
