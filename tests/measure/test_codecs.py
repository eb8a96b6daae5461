"""Every compressor is measured, alone and in its own settings, into lines that can be
read.
"""

from __future__ import annotations

import pytest

from gradwire.contract import Compressor, Exchange
from gradwire.contract.registry import load, names
from gradwire.contract.spec import squarest
from gradwire.contract.verbs import Compute
from gradwire.errors import InvalidSetting, UnknownName
from gradwire.measure import codecs
from gradwire.measure.codecs import measure_codecs
from gradwire.measure.layers import no_progress
from gradwire.planning.data.cluster import PRIMITIVES, Cluster
from papers.one_exchange import simulate_exchange
from tests.each import each

SIZES = (256, 1024, 2**17)


def test_every_compressor_has_its_lines() -> None:
    reported: list[float] = []
    found = measure_codecs(
        sizes=SIZES,
        budget_s=0.002,
        advance=lambda amount, note: reported.append(amount),
    )
    assert tuple(found) == names("compress")
    for name, fit in found.items():
        is_own = issubclass(load("compress", name), Exchange)
        for primitive in PRIMITIVES:
            line = getattr(fit, primitive)
            sizes = tuple(size for size, _ in line.samples)
            assert sizes == SIZES or is_own
            assert bool(sizes) is not line.is_nothing
            assert all(seconds > 0 for _, seconds in line.samples)
        assert fit.encode.samples
        assert fit.decode.samples or name in ("sharded_dgc", "selective")  # which merge
    assert sum(reported) == pytest.approx(len(found) * len(SIZES))
    # Selecting and scattering 131072 elements is more work than looking at 256.
    times = dict(found["topk"].encode.samples)
    assert times[SIZES[-1]] > times[SIZES[0]]
    cluster = Cluster(num_ranks=2, rate_bytes_per_s=1e9, codecs=found)
    assert Cluster.parse(cluster.to_json()) == cluster


ALL = [load("compress", name)() for name in names("compress")]


@each("codec", [a for a in ALL if isinstance(a, Compressor)])
def test_error_feedback_is_measured_where_the_trait_asks_for_it(
    codec: Compressor,
) -> None:
    measured = codecs._Codec(codec, 1000, 4)
    measured.source_N.mul_(1000)  # large enough for any threshold
    buffer = measured.buffer
    for _ in range(3):
        measured.turn_s()
    kept = measured.residual_N
    assert (kept is not None) == codec.traits.error_feedback
    if kept is not None:
        assert bool(kept.any())
    assert measured.buffer is buffer
    assert bool(measured.sum_N.any())


@pytest.mark.parametrize(
    "exchange", [a for a in ALL if isinstance(a, Exchange)], ids=repr
)
def test_what_all_of_a_step_took_is_what_a_prediction_counts(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often an exchange encodes in a step, and of however many elements each
    time.

    By a clock that shows 1 s more for an encode, 2 s for a merge and 3 s for a decode.
    """
    each_s = {"encode": 1.0, "merge": 2.0, "decode": 3.0}
    timed = codecs._Text._timed

    def ticking(self: codecs._Text, verb: Compute, seconds: dict[str, float]) -> object:
        result = timed(self, verb, dict.fromkeys(PRIMITIVES, 0.0))
        seconds[verb.name] += each_s[verb.name]
        return result

    monkeypatch.setattr(codecs._Text, "_timed", ticking)
    name, world, numel = type(exchange).__name__, 2, 1024
    cluster = Cluster(
        num_ranks=world,
        rate_bytes_per_s=1e9,
        codecs=measure_codecs([name], world=world, sizes=SIZES, budget_s=0.001),
    )
    shapes = squarest(numel) if exchange.declared.whole_tensors else ()
    trace = simulate_exchange(exchange, numel, cluster, shapes=shapes)
    spans = [span for span in trace.spans if span.rank == 0 and span.lane == "compute"]
    assert {span.name for span in spans} <= set(PRIMITIVES)
    for span in spans:
        assert span.duration_s == pytest.approx(each_s[span.name])


def test_mistakes_are_answered() -> None:
    with pytest.raises(UnknownName, match=r"there are: .*topk"):
        measure_codecs(["tpok"], sizes=SIZES)
    with pytest.raises(InvalidSetting, match="three numbers of elements"):
        measure_codecs(["none"], sizes=(1, 2))


def test_a_wait_for_others_within_a_round_counts_and_a_bad_round_does_not() -> None:
    class Shared:
        """A codec whose every second turn waits for a core, and the machine stops
        once.
        """

        num_turns = 0

        def __init__(self, numel: int) -> None:
            self.numels = {key: [numel] for key in PRIMITIVES}

        def turn_s(self) -> dict[str, float]:
            self.num_turns += 1
            seconds = (
                9.0 if self.num_turns == 5 else 1e-3 * (1 + 2 * (self.num_turns % 2))
            )
            return dict.fromkeys(PRIMITIVES, seconds)

    cases = [Shared(numel) for numel in (1000, 2000, 3000)]
    rounds = codecs._rounds(cases, budget_s=0.6, advance=no_progress)  # type: ignore[arg-type]
    assert all(len(own) == codecs.ROUNDS for own in rounds)
    assert codecs._fit("encode", cases, rounds).seconds(1000) == pytest.approx(
        2e-3, rel=0.05
    )  # type: ignore[arg-type]
