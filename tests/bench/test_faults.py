"""`bench faults`: what a trial is judged by, and a fixed trial of each kind on real
ranks.
"""

from __future__ import annotations

import pytest

from gradwire.runtime.local_steps import mail
from gradwire_bench.faults import faults_judge
from gradwire_bench.faults.accidents import (
    DDP,
    FSDP,
    HEALED,
    HOSTS_SHRINK,
    HSDP_SHRINK,
    IN_PAIRS,
    KINDS,
    LINKS,
    LOCAL,
    LOCAL_KINDS,
    NEWCOMER,
    OWNER,
    REJOIN,
    SHRINK,
    WAYS,
    Accident,
)
from gradwire_bench.faults.faults import FaultsBench, accidents_of, run
from gradwire_bench.faults.faults_judge import Aftermath, Ending, judge
from gradwire_bench.faults.striking import InjectedError, Striker
from gradwire_bench.testbed.hosts import available
from gradwire_bench.testbed.wide_area import WideArea
from tests.each import each

WORLD = 4
WHENS = ("before", "during", "after")
WELL = Ending("", False, (), -1, "", 3.0, 7)
VICTIM = 2


def accident(kind: str, point: str = "verb") -> Accident:
    return Accident(
        0, "plain", kind, (VICTIM,), point, "before", 2, 0.0, 0.0, 0.0, 5.0, 1
    )


def lost(
    ranks: tuple[int, ...] = (VICTIM,), step: int = 2, end_s: float = 3.0
) -> Ending:
    return Ending("RankFailed", True, ranks, step, "", end_s, 0)


def aftermath(*endings: Ending | None, **changed: object) -> Aftermath:
    """A trial that was struck at 0 s, whose processes have ended but for those that
    never said.
    """
    codes = tuple(None if ending is None else 0 for ending in endings)
    return Aftermath({VICTIM: 0.0}, endings, codes, ("",) * WORLD)._replace(**changed)  # type: ignore[arg-type]


KILLED = aftermath(lost(), lost(), None, lost(step=3))


@pytest.mark.smoke
@each(
    "kind, found, flaws",
    [
        ("kill", KILLED, set()),
        ("kill", aftermath(lost(), None, None, lost()), {"hangs"}),
        (
            "kill",
            aftermath(lost(), None, None, lost(), exit_codes=(0, -6, -9, 0)),
            {"raw"},
        ),
        ("kill", aftermath(lost(), lost((1,)), None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), lost((1, 2)), None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), WELL, None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), lost(step=4), None, lost()), {"apart"}),
        ("kill", aftermath(lost(), lost(end_s=10.1), None, lost()), {"late"}),
        ("kill", KILLED._replace(exit_codes=(0, None, None, 0)), {"left"}),
        ("kill", KILLED._replace(struck_s={}), {"not_struck"}),
        (
            "kill",
            aftermath(
                lost(), Ending("ValueError", False, (), -1, "", 3.0, 0), None, lost()
            ),
            {"raw", "misnamed"},
        ),
        ("straggle", aftermath(WELL, WELL, WELL, WELL), set()),
        ("straggle", aftermath(WELL, lost(), WELL, WELL), {"misnamed"}),
        ("flip received", aftermath(WELL, WELL, WELL, WELL), set()),
        (
            "flip received",
            aftermath(WELL, WELL, WELL._replace(digest=8), WELL),
            {"diverged"},
        ),
        ("flip received", aftermath(lost(), lost(), lost(), lost()), set()),
        ("flip received", aftermath(lost(), lost((1,)), lost(), lost()), {"misnamed"}),
    ],
)
def test_a_trial_is_judged_by_its_ends(
    kind: str, found: Aftermath, flaws: set[str]
) -> None:
    assert set(judge(accident(kind), found).wrong) == flaws


def test_far_ranks_have_ten_round_trips_more() -> None:
    found = aftermath(lost(), lost(end_s=10.7), None, lost())
    assert set(judge(accident("kill"), found).wrong) == {"late"}
    assert judge(accident("kill"), found, round_trip_s=0.08).wrong == {}


def side(*ranks: int, text: str = "the network is parted") -> Ending:
    return lost(ranks)._replace(text=text)


@each(
    "endings, flaws",
    [
        ((side(2, 3), side(2, 3), side(0, 1), side(0, 1)), set()),
        ((side(2, 3), side(2, 3), side(0), side(0, 1)), {"misnamed"}),
        (
            (side(2, 3), side(2, 3, text="stopped answering"), side(0, 1), side(0, 1)),
            {"misnamed"},
        ),
        ((side(2, 3), WELL, side(0, 1), side(0, 1)), {"misnamed"}),
    ],
)
def test_each_side_of_a_parted_network_names_the_other(
    endings: tuple[Ending, ...], flaws: set[str]
) -> None:
    parted = accident("partition 2-2")._replace(victims=(2, 3))
    assert set(judge(parted, aftermath(*endings)).wrong) == flaws


def test_a_resumed_run_ends_in_the_bits_of_one_that_was_never_killed() -> None:
    found = aftermath(WELL, WELL, WELL, WELL)
    assert judge(accident("resume"), found._replace(digest=7)).wrong == {}
    assert set(judge(accident("resume"), found._replace(digest=8)).wrong) == {
        "diverged"
    }


def trained(*ranks: int, steps: int = 10, of_all: int = 32, digest: int = 7) -> Ending:
    return WELL._replace(ranks=ranks, steps=steps, of_all=of_all, digest=digest)


ON = trained(VICTIM)


@each(
    "kind, endings, flaws",
    [
        ("kill owner", (ON, ON, None, ON), set()),
        ("kill owner", (ON, ON, None, trained()), {"misnamed"}),
        ("kill owner", (ON, ON, None, trained(1, VICTIM)), {"misnamed"}),
        ("kill owner", (ON, ON, None, lost()), {"misnamed"}),
        ("kill owner", (ON, ON, None, trained(VICTIM, digest=8)), {"diverged"}),
        ("kill owner", (ON, ON, None, None), {"hangs"}),
        ("kill owner", (trained(VICTIM, of_all=29), ON, None, ON), {"owed"}),
        ("link down", (ON, ON, lost((0, 1, 3)), ON), set()),
        ("flap 15 s", (trained(VICTIM, of_all=40),) * 4, set()),
        ("flap 15 s", (trained(VICTIM, of_all=41),) * 4, {"owed"}),
        ("pause", (trained(of_all=40),) * 4, set()),
        ("pause", (trained(VICTIM, of_all=40),) * 4, {"misnamed"}),
        ("kill store", (lost(()),) * 4, set()),
        ("kill store", (lost((1,)),) * 4, {"misnamed"}),
    ],
)
def test_a_trial_of_local_steps_is_judged_by_what_the_others_have_learnt(
    kind: str, endings: tuple[Ending | None, ...], flaws: set[str]
) -> None:
    trial = accident(kind, "message")._replace(way=LOCAL)
    assert set(judge(trial, aftermath(*endings)).wrong) == flaws


BOTH = trained(1, 2)
BACK = trained(VICTIM, of_all=45)
CALM = trained(of_all=40)
NEW = trained(WORLD, of_all=42)
NEAR = trained(2, 3, of_all=50)
PARTED = trained(0, 1, 4, of_all=50)
CUT = lost((0, 1, 4))
IN_TIME = 20.0
TOO_LATE = 5.0
"""Time-outs within which a partition heals that takes 7.7 s, and within which not."""


@each(
    "kind, victims, endings, flaws",
    [
        ("kill two", (1, 2), (BOTH, None, None, BOTH), set()),
        ("kill two", (1, 2), (BOTH, None, None, trained(1)), {"misnamed"}),
        ("kill two", (1, 2), (BOTH, None, None, lost((1, 2))), {"misnamed"}),
        (OWNER, (2,), (ON, ON, None, ON), set()),
        (OWNER, (2,), (ON, ON, None, trained(VICTIM, digest=8)), {"diverged"}),
        (REJOIN, (2,), (BACK, BACK, None, BACK, trained(of_all=45)), set()),
        (REJOIN, (2,), (BACK, BACK, None, BACK, None), {"hangs"}),
        (REJOIN, (2,), (BACK, BACK, None, BACK, lost(())), {"misnamed"}),
        (REJOIN, (2,), (BACK, BACK, None, BACK, trained(1, of_all=45)), {"misnamed"}),
        (REJOIN, (2,), (BACK, BACK, None, CALM, trained(of_all=45)), {"misnamed"}),
        (REJOIN, (2,), (BACK, BACK, None, BACK, trained(of_all=39)), {"owed"}),
        (
            REJOIN,
            (2,),
            (BACK, BACK, None, BACK, trained(of_all=45, digest=8)),
            {"diverged"},
        ),
        (NEWCOMER, (4,), (CALM, CALM, CALM, CALM, None), set()),
        (NEWCOMER, (4,), (NEW, NEW, NEW, NEW, None), set()),
        (NEWCOMER, (4,), (NEW, NEW, NEW, trained(1, of_all=42), None), {"misnamed"}),
        (NEWCOMER, (4,), (CALM, CALM, CALM, lost((4,)), None), {"misnamed"}),
        (NEWCOMER, (4,), (CALM, CALM, CALM, None, None), {"hangs"}),
        (NEWCOMER, (4,), (NEW, NEW, NEW, trained(4, of_all=39), None), {"owed"}),
    ],
)
def test_a_trial_in_which_processes_come_is_judged_by_those_that_live(
    kind: str,
    victims: tuple[int, ...],
    endings: tuple[Ending | None, ...],
    flaws: set[str],
) -> None:
    trial = accident(kind, "message")._replace(way=LOCAL, victims=victims)
    found = aftermath(*endings, last_lines=("",) * (WORLD + 1))
    assert set(judge(trial, found).wrong) == flaws


@each(
    "timeout_s, endings, flaws",
    [
        (IN_TIME, (NEAR, NEAR, PARTED, PARTED, NEAR), set()),
        (IN_TIME, (CALM._replace(of_all=50),) * 5, set()),
        (IN_TIME, (NEAR, NEAR, PARTED, CUT, NEAR), {"misnamed"}),
        (TOO_LATE, (NEAR, NEAR, PARTED, CUT, NEAR), set()),
        (TOO_LATE, (NEAR, NEAR, PARTED, lost((3,)), NEAR), set()),
        (TOO_LATE, (NEAR, NEAR, lost((2, 3), step=9), lost((2, 3)), NEAR), set()),
        (TOO_LATE, (NEAR, NEAR, PARTED, lost((0, 3)), NEAR), {"misnamed"}),
        (TOO_LATE, (NEAR, NEAR, PARTED, lost(()), NEAR), {"misnamed"}),
        (TOO_LATE, (CALM, NEAR, CUT, CUT, NEAR), {"misnamed"}),
        (TOO_LATE, (NEAR, NEAR, CUT, None, NEAR), {"hangs"}),
        (
            IN_TIME,
            (NEAR, NEAR, PARTED, PARTED._replace(digest=8), NEAR),
            {"diverged"},
        ),
        (IN_TIME, (NEAR, NEAR, PARTED, PARTED._replace(of_all=51), NEAR), {"owed"}),
    ],
)
def test_a_parted_network_that_heals_is_judged_by_who_comes_back(
    timeout_s: float, endings: tuple[Ending | None, ...], flaws: set[str]
) -> None:
    """Ranks 2 and 3 are cut off; each names the others, or itself."""
    healed = accident(HEALED)._replace(
        way=LOCAL, victims=(2, 3), timeout_s=timeout_s, bit=0.5
    )
    assert set(judge(healed, aftermath(*endings)).wrong) == flaws


def went_on(*ranks: int, digest: int = 7, next_s: float = 5.0) -> Ending:
    return WELL._replace(ranks=ranks, digest=digest, next_s=next_s)


@each(
    "endings, flaws",
    [
        ((went_on(2, 3), went_on(2, 3), None, lost()), set()),
        ((went_on(2, 3), went_on(2), None, lost()), {"misnamed"}),
        ((went_on(2, 3), lost(), None, lost()), {"misnamed"}),
        ((went_on(2, 3), went_on(2, 3), None, went_on(2)), {"misnamed"}),
        ((went_on(2, 3), went_on(2, 3), None, lost((1,))), {"misnamed"}),
        ((went_on(2, 3), went_on(2, 3, digest=8), None, lost()), {"diverged"}),
        ((went_on(2, 3), None, None, lost()), {"hangs"}),
    ],
)
def test_a_pair_that_has_lost_a_rank_leaves_and_the_others_go_on(
    endings: tuple[Ending | None, ...], flaws: set[str]
) -> None:
    for way in IN_PAIRS:
        trial = accident("kill")._replace(way=way)
        # ranks of a replica hold shards, which differ
        expected = flaws - ({"diverged"} if way == HSDP_SHRINK else set())
        assert set(judge(trial, aftermath(*endings)).wrong) == expected


@each("rank, flaws", [(3, set()), (1, {"raw", "misnamed"})])
def test_a_replica_that_has_lost_a_rank_may_end_by_torchs_error(
    rank: int, flaws: set[str]
) -> None:
    """Its ranks meet in FSDP's collectives; ranks of other replicas do not."""
    trial = accident("kill")._replace(way=HSDP_SHRINK)
    ends = [went_on(2, 3), went_on(2, 3, digest=8), None, lost()]
    assert judge(trial, aftermath(*ends)).wrong == {}, "shards have other parameters"
    ends[rank] = Ending("RuntimeError", False, (), -1, "", 3.0, 0)
    assert set(judge(trial, aftermath(*ends)).wrong) == flaws


def test_the_last_of_the_others_to_go_on_counts() -> None:
    trial = accident("kill")._replace(way=SHRINK)
    last = went_on(2, next_s=7.5)
    found = aftermath(went_on(2), last, None, went_on(2), struck_s={VICTIM: 3.0})
    assert judge(trial, found).next_s == 4.5
    assert judge(accident("straggle"), aftermath(*[WELL] * WORLD)).next_s is None


@each("when, num_sent", [("before", 1), ("during", 1.5), ("after", 2)])
def test_a_fault_strikes_at_a_message(when: str, num_sent: float) -> None:
    """Half a message is its head, whose payload is not sent."""
    sent = 0.0

    def send() -> None:
        nonlocal sent
        while True:
            mail._parts(mail.Leaving())
            _, *rest = mail._parts(mail.Drained())
            sent += 0.5
            mail._pieces(rest)
            sent += 0.5

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_parts", "_pieces"):
            patch.setattr(mail, name, getattr(mail, name))
        trial = accident("raise", "message")._replace(when=when)
        Striker(trial, lambda now_s: None).at_message(mail.Drained, 1)
        with pytest.raises(InjectedError):
            send()
    assert sent == num_sent


def test_all_is_drawn_from_the_seed_and_the_number() -> None:
    some = accidents_of(FaultsBench(trials=600, seed=1))
    assert accidents_of(FaultsBench(trials=11, seed=1)) == some[:11]
    assert {each.kind for each in some} == set(KINDS)
    assert {each.way for each in some} == set(WAYS)
    assert all(each.point != "broadcast" or each.way != DDP for each in some)
    assert all(each.way != FSDP for each in some if each.kind in LINKS)
    locally = accidents_of(FaultsBench(trials=300, seed=1, ways=(LOCAL,)))
    assert {each.kind for each in locally} == set(LOCAL_KINDS)
    healing = [each for each in locally if each.kind == HEALED]
    assert all(1 <= each.heals_s < 60 for each in healing)
    assert min(each.heals_s for each in healing) < 3
    assert max(each.heals_s for each in healing) > 30
    assert {each.when for each in locally if each.kind == OWNER} == {*WHENS}
    assert {each.victims for each in locally if each.kind == NEWCOMER} == {(4,)}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_survivors_of_fixed_trials_say_what_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial of each kind that this machine can do, flaps once; a busy one has more
    time.

    With this seed processes end at all points of an attach, in a step, under DDP, and
    rank 0's too.
    """
    monkeypatch.setattr(faults_judge, "GRACE_S", 20.0)
    can = {*KINDS} - ({"flap 5 s", "flap 15 s"} if available() else {*LINKS})
    kinds = tuple(kind for kind in KINDS if kind in can)
    settings = FaultsBench(
        trials=len(kinds), seed=5356, at_once=8, only=kinds, timeout_s=6.0
    )
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert rows[-1]["trials"] == len(kinds)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.netns
@pytest.mark.timeout(400)
def test_faults_are_named_between_far_hosts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes that end or stop, the store and links, each on hosts 5 ms apart."""
    monkeypatch.setattr(faults_judge, "GRACE_S", 20.0)
    kinds = ("kill", "kill store", "pause", "resume", "link down")
    far = WideArea(delay_s=0.005, slow=((1, 2.5e6),))
    settings = FaultsBench(
        trials=len(kinds), seed=5, only=kinds, timeout_s=6.0, wide_area=far
    )
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert [row["name"] for row in rows] == [*kinds, "all"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_a_rank_of_a_replica_that_stands_still_takes_its_replica_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its mates hear of it from other replicas, long before their own wait is over: it
    lasts four time-outs, 40 s.
    """
    monkeypatch.setattr(faults_judge, "GRACE_S", 20.0)
    settings = FaultsBench(
        trials=2,
        seed=5,
        at_once=2,
        only=("stop",),
        ways=(HSDP_SHRINK,),
        timeout_s=10.0,
    )
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert rows[-1]["trials"] == 2


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_a_lost_coordinator_and_a_lost_server_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator is killed, a server stops, and ranks go on without a coordinator,
    or without a host.
    """
    monkeypatch.setattr(faults_judge, "GRACE_S", 20.0)
    kinds = ("kill", "stop", "exit")
    settings = FaultsBench(
        trials=4,
        seed=25070,
        at_once=4,
        only=kinds,
        ways=("coordinator", "server", "coordinator shrink", HOSTS_SHRINK),
        timeout_s=6.0,
    )
    struck = {one.way: one for one in accidents_of(settings)}
    assert len(struck) == 4
    assert struck["server"].victims == (3,)
    for way in ("coordinator", "coordinator shrink"):
        # the coordinator's rank
        assert struck[way].victims == (struck[way].number % 4,)
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert rows[-1]["trials"] == 4


def test_a_servers_parameters_are_no_workers() -> None:
    calm = accident("straggle")._replace(way="server")
    other = WELL._replace(digest=8)
    assert judge(calm, aftermath(WELL, WELL, WELL, other)).wrong == {}
    found = aftermath(WELL, WELL, other, other)
    assert set(judge(calm, found).wrong) == {"diverged"}


def test_a_server_that_is_cut_off_has_no_more_time_than_another_rank() -> None:
    cut = accident("link down")._replace(way="server", victims=(3,))
    other = lost((3,))
    late = lost((3,), end_s=cut.timeout_s + 30.0)
    assert judge(cut, aftermath(other, other, other, other)).wrong == {}
    for flaw, found in (
        ("late", aftermath(other, other, other, late)),
        ("hangs", aftermath(other, other, other, None)),
    ):
        assert set(judge(cut, found).wrong) == {flaw}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_ranks_under_local_steps_train_on_without_lost_ones() -> None:
    """Processes that end anywhere, also before a merge is sent; one that waits, and
    others that come in or come back.
    """
    kinds = ["kill", OWNER, "kill two", "pause", REJOIN, NEWCOMER]
    if available():
        kinds.append(HEALED)
    settings = FaultsBench(
        trials=len(kinds), seed=1, only=tuple(kinds), ways=(LOCAL,), timeout_s=20.0
    )
    assert {*kinds} < {*LOCAL_KINDS}
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert [row["name"] for row in rows] == [*kinds, "all"]
