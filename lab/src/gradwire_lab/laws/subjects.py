"""The laws for each kind of algorithm, the inputs that they are tried on, and how each
law went.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.contract import Compressor, Exchange
from gradwire.contract.collective import Collective
from gradwire.contract.registry import load, names
from gradwire.dsl.program import Program
from gradwire.errors import IncompatiblePair, invalid
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.pair import Pair, pair, suited
from gradwire_lab.exchange.clipping import Clipping
from gradwire_lab.exchange.momentum import DecoupledMomentum, MomentumCorrection

from ..errors import LawBroken
from . import (
    bounded,
    collectives,
    compressors,
    densities,
    exchanges,
    growth,
    many_steps,
    planners,
    programs,
    roundings,
)
from .cases import EVERY_WORLD_AND_SIZE, FEW, Case
from .inputs import Drawn, Facts, facts, panel

Law = Callable[..., bool | None]
SMALL_FIRST = tuple(sorted(FEW, key=lambda case: case.world * case.numel))
FEW_LONG = tuple(case for case in SMALL_FIRST if case.numel in (5, 64, 300))
"""Cases of laws that take many steps, in float32 and float64: more would take a
minute.
"""
DENSITIES = (0.1, 0.01)
DENSITY_SIZES = (100, 20_000)


@dataclass(frozen=True)
class Input:
    """One input: its words, and the arguments of a law after the algorithm, made when
    needed.
    """

    words: str
    arguments: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Subject:
    """Laws that one algorithm is held to, and the inputs, the small first."""

    algorithm: Any
    laws: Sequence[Law]
    inputs: Sequence[Input]
    tried: str
    """The inputs in words; empty where they go without saying."""


@dataclass(frozen=True)
class Verdict:
    """How one law went: of how many inputs it was asked, and what it found on the first
    that broke it.
    """

    law: Law
    num_inputs: int
    given: str = ""
    found: str = ""

    @property
    def word(self) -> str:
        """The verdict in one word."""
        if self.found:
            return "broken"
        return "holds" if self.num_inputs else "not asked"

    @property
    def sentence(self) -> str:
        """The law."""
        return _paragraphs(self.law)[0]

    @property
    def remedy(self) -> str:
        """How to mend what breaks it."""
        last = _paragraphs(self.law)[-1]
        if last.startswith("To do: "):
            return last.removeprefix("To do: ")
        return ""


def _paragraphs(law: Law) -> list[str]:
    text = inspect.getdoc(law) or law.__name__.removeprefix("law_").replace("_", " ")
    return [" ".join(part.split()) for part in text.split("\n\n")]


def check(held: Subject) -> Iterator[Verdict]:
    """The verdict on each law, in turn; one that holds has seen all inputs."""
    for law in held.laws:
        yield _verdict(law, held)


def _verdict(law: Law, held: Subject) -> Verdict:
    num_asked = 0
    for input_ in held.inputs:
        try:
            asked = law(held.algorithm, *input_.arguments())
        except LawBroken as broken:
            return Verdict(law, num_asked + 1, input_.words, str(broken))
        except Exception as error:  # whatever an algorithm of the user's may raise
            return Verdict(law, num_asked + 1, input_.words, _ended(error))
        num_asked += asked is not False
    return Verdict(law, num_asked)


def _ended(error: Exception) -> str:
    """The error that was raised, and the last line outside gradwire that it came
    through.
    """
    folder = Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if folder not in Path(frame.filename).parents]
    where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
    return f"raised {type(error).__name__}{where}: {error}"


# ---- what each kind is held to -------------------------------------------------------


def kind_of(algorithm: Any) -> str | None:
    """The kind of an algorithm, in a word; None for what no law is about."""
    if isinstance(algorithm, Compressor):
        return "compressor"
    if isinstance(algorithm, Collective):
        return "collective"
    if isinstance(algorithm, Exchange):
        return "exchange"
    return (
        "planner" if callable(algorithm) and not isinstance(algorithm, type) else None
    )


def held_to(algorithm: Any) -> list[Subject]:
    """The laws for an algorithm of any kind, with their inputs.

    A compressor is held to those of its exchange too, through the collective that suits
    it, and must not make means grow through one that encodes sums again. A collective
    is held to those of exchanges with a shipped compressor of each set of traits it
    takes.
    """
    match kind_of(algorithm):
        case "compressor":
            return [*_of_compressor(algorithm), *_of_densities(algorithm)]
        case "collective":
            return _of_collective(algorithm)
        case "exchange":
            return [*_of_exchange(algorithm), *_of_densities(algorithm)]
        case "planner":
            return [_of_planner(algorithm)]
    accepted = "a compressor, an exchange, a collective or a planner"
    raise invalid(
        "what is checked", algorithm, accepted, "name one of your file as FILE:NAME"
    )


def _of_compressor(codec: Compressor) -> list[Subject]:
    drawn = panel(getattr(codec, "block", None))
    inputs = [Input(str(case), partial(_gradient, case)) for case in drawn]
    kinds = ", ".join(dict.fromkeys(case.kind for case in drawn))
    sizes = ", ".join(str(numel) for numel in sorted({case.numel for case in drawn}))
    tried = (
        f"{len(drawn)} gradients ({kinds}) of {sizes} elements in float32, float64, "
        "bfloat16 and float16, contiguous and not"
    )
    laws: tuple[Law, ...] = compressors.LAWS
    if isinstance(codec, Program):
        laws += programs.LAWS
    subjects = [
        Subject(codec, laws, inputs, tried),
        *_of_exchange(pair(codec, suited(codec))),
    ]
    for name in names("collective"):
        again = load("collective", name)()
        if again.encodes_sums and again.needs.refusal(codec.traits) is None:
            subjects.append(
                _with_cases(pair(codec, again), growth.LAWS, growth.MANY_RANKS)
            )
    return subjects


def _of_densities(algorithm: Any) -> list[Subject]:
    statement = Subject(
        algorithm,
        (densities.law_density_range_is_stated,),
        [Input("its traits", tuple)],
        "",
    )
    if not densities.has_density(algorithm):
        return [statement]
    kinds = (*densities.KINDS, *densities.UNKIND)
    inputs = [
        Input(
            f"{kind}, {numel} elements, density {density}, seed 0",
            partial(_of_density, density, kind, numel),
        )
        for numel in DENSITY_SIZES
        for kind in kinds
        for density in DENSITIES
    ]
    laws = (densities.law_no_more_than_stated, densities.law_no_less_than_stated)
    tried = (
        f"densities {_listed(DENSITIES)} of gradients ({', '.join(kinds)}) of "
        f"{_listed(DENSITY_SIZES)} elements"
    )
    return [statement, Subject(algorithm, laws, inputs, tried)]


def _of_exchange(exchange: Exchange) -> list[Subject]:
    """Laws wrap an exchange in error feedback themselves, so feedback around it comes
    off.
    """
    if isinstance(exchange, ErrorFeedback):
        return _of_exchange(exchange.inner)
    laws: tuple[Law, ...]
    if isinstance(exchange, (MomentumCorrection, DecoupledMomentum, Clipping)):
        laws = (*collectives.OF_ANY, *exchanges.OF_ANY_ACCOUNT)
    else:
        general = collectives.OF_ANY
        if isinstance(exchange, Pair):
            general = collectives.LAWS
        laws = (*general, *exchanges.LAWS, *bounded.LAWS, *growth.LAWS)
    takes_long = {*many_steps.LAWS, *bounded.LAWS, *growth.LAWS}
    brief = [law for law in laws if law not in takes_long]
    long = [law for law in laws if law in takes_long and law not in growth.LAWS]
    of_many = [law for law in laws if law in growth.LAWS]
    of_roundings = roundings.LAWS if isinstance(exchange, Pair) else ()
    subjects = [
        _with_cases(exchange, brief, SMALL_FIRST),
        _with_cases(exchange, long, FEW_LONG),
        _with_cases(exchange, of_many, growth.MANY_RANKS),
        _with_cases(exchange, of_roundings, roundings.UP_TO_16_RANKS),
    ]
    return [subject for subject in subjects if subject.laws]


def _with_cases(
    exchange: Exchange, laws: Sequence[Law], cases: Sequence[Case]
) -> Subject:
    first = collectives.law_never_deadlocks
    ordered = sorted(laws, key=lambda law: law is not first)
    through = ""
    if isinstance(exchange, Pair):
        through = f", {exchange.codec!r} through {exchange.collective!r}"
    inputs = [Input(f"{case}{through}", partial(tuple, (case,))) for case in cases]
    worlds = {case.world for case in cases}
    sizes = {case.numel for case in cases}
    dtypes = dict.fromkeys(str(case.dtype).removeprefix("torch.") for case in cases)
    tried = (
        f"{_listed(sorted(worlds))} ranks with {_listed(sorted(sizes))} elements in "
        f"{_listed(list(dtypes))}{through}, in seeded interleavings"
    )
    return Subject(exchange, ordered, inputs, tried)


def _of_collective(collective: Collective) -> list[Subject]:
    subjects = []
    for codec in codecs_for(collective):
        made = pair(codec, collective)
        subjects += _of_exchange(made)
        if codec.traits.lossless:
            every = sorted(
                EVERY_WORLD_AND_SIZE, key=lambda case: case.world * case.numel
            )
            subjects.append(
                _with_cases(made, (collectives.law_equals_the_dense_mean,), every)
            )
    if not subjects:
        accepted = "one whose needs some compressor of gradwire's meets"
        raise invalid(
            "collective", collective, accepted, "name a pair with your own compressor"
        )
    return subjects


def codecs_for(collective: Collective) -> list[Compressor]:
    """Shipped compressors that a collective takes: of each set of traits the first by
    name.
    """
    codecs: dict[object, Compressor] = {}
    for name in names("compress"):
        codec = load("compress", name)()
        if not isinstance(codec, Compressor):
            continue
        try:
            pair(codec, collective)
        except IncompatiblePair:
            continue
        own_traits = codec.traits
        alike = (
            own_traits.layout,
            own_traits.exact_size,
            own_traits.lossless,
            own_traits.unbiased,
            own_traits.shared_scale,
        )
        codecs.setdefault(alike, codec)
    return list(codecs.values())


def _of_planner(planner: Any) -> Subject:
    inputs = [Input(str(facts_), partial(_of_facts, facts_)) for facts_ in facts()]
    ranks = sorted({one.cluster.num_ranks for one in facts()})
    tried = (
        f"{len(inputs)} models of up to {max(len(one.rows) for one in facts())} layers "
        f"and {max(one.num_elements for one in facts())} elements in float32 and "
        f"bfloat16, on clusters of {_listed(ranks)} ranks"
    )
    return Subject(planner, planners.LAWS, inputs, tried)


def _gradient(drawn: Drawn) -> tuple[Any, ...]:
    return (drawn.grad(),)


def _of_density(density: float, kind: str, numel: int) -> tuple[Any, ...]:
    return density, densities.drawn(kind, numel)


def _of_facts(given: Facts) -> tuple[Any, ...]:
    return given.profile(), given.cluster


def _listed(values: Sequence[object]) -> str:
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} and {last}" if most else last


NOT_TRIED = (
    "settings other than these; longer gradients; more ranks; GPUs; processes "
    "and a network (all "
    "ranks run in this one process); how fast it is; whether a training converges"
)
