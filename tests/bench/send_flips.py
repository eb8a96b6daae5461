"""Single bits that flip in what gloo writes to its sockets, without checksums and with
them.

python -m tests.bench.send_flips --trials 60 --seed 1

Each trial is three ranks on the loopback that train for 12 steps, by one of
``EXCHANGES``. In one call that one of them sends a payload by, one bit flips: in half
of all trials a bit of the payload, in the others one of all that the call writes, which
begins with a header of gloo's own. ``writev`` of send_flips.cpp, loaded before libc's,
does it. The same seeds train without checksums and with. Channels' calls take turns as
the machine has it, so a seed may strike another payload the next time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from gradwire.cli.report.table import Row
from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.onebit import onebit
from gradwire.compress.uniform import uniform
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.kernels.compiler import find_compiler
from gradwire.runtime.attach import attach
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire_bench.faults.faults_rank import exchange_of
from gradwire_lab.collective.casync_ring import casync_ring
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks

WORLD, NUM_STEPS, EVERY = 3, 12, 3
LOCALLY = "local_steps"
EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "topk": lambda: exchange_of("allgather_sparse"),
    "onebit": lambda: with_error_feedback(
        pair(onebit(block=64), casync_ps(room_bytes=0))
    ),
    "uniform": lambda: pair(uniform(), casync_ring(half_bytes=0)),
    "ring": lambda: exchange_of("ring"),
    "zen": lambda: exchange_of("zen"),
    LOCALLY: lambda: exchange_of("allgather_sparse"),
}
VERDICTS = {
    "named": "noticed, and all that raise name the one that sent it; others had ended, "
    "unharmed",
    "noticed": "noticed, and not so named",
    "killed": "a process ended by a signal",
    "hung": "a rank that never ended",
    "wrong": "the same wrong parameters on all ranks, unnoticed",
    "diverged": "other parameters on each rank, unnoticed",
    "no effect": "the parameters that there would be without it: low bits of gradients "
    "are lost where parameters round, and a count of used parameters is still above 0",
    "not struck": "the call never came",
}
"""The outcomes of a trial."""
_TIMEOUT_S, _PATIENCE_S = 8.0, 60.0


class Trial(NamedTuple):
    """One flip: ``call`` and ``place``, in [0, 1), say where, of all calls and of all
    bits.
    """

    number: int
    way: str
    checksums: bool
    victim: int
    call: float = 0.0
    place: float = 0.0
    header: bool = False


class Outcome(NamedTuple):
    """The end of one rank: its error's type and what it names, or the CRC-32 of its
    parameters.
    """

    error: str
    ranks: tuple[int, ...]
    text: str
    digest: int
    calls: int


def drawn(seed: int, number: int, checksums: bool) -> Trial:
    """The trial of a number, with or without checksums, else the same."""
    draw, names = random.Random(f"{seed}/{number}"), [*EXCHANGES]
    return Trial(
        number,
        names[number % len(names)],
        checksums,
        draw.randrange(WORLD),
        draw.random(),
        draw.random(),
        number // len(names) % 2 == 1,
    )


def built(folder: Path) -> Path:
    """The library that flips, compiled into ``folder``."""
    compiler, library = find_compiler(), folder / "flips.so"
    assert compiler is not None, "a C++ compiler is needed: install g++"
    text = Path(__file__).with_name("send_flips.cpp")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, "-o", library, text, "-ldl"], check=True)
    return library


def struck(
    rank: int, world: int, library: str, report: str, trial: Trial, calls: Sequence[int]
) -> Outcome:
    """A rank trains, one of its calls is struck, and it tells how that ended."""
    flips = ctypes.CDLL(library)
    flips.gw_calls.restype = ctypes.c_long
    file = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    at, place = ctypes.c_long(calls[rank]), ctypes.c_double(trial.place)
    digest, error = 0, None
    try:
        digest = trained(
            trial, rank, lambda: flips.gw_flip(at, place, int(trial.header), file)
        )
    except Exception as raised:
        error = raised
    kind = "" if error is None else type(error).__name__
    return Outcome(
        kind, getattr(error, "ranks", ()), str(error or ""), digest, flips.gw_calls()
    )


def trained(trial: Trial, rank: int, begin: Callable[[], Any]) -> int:
    """The CRC-32 of the parameters after every third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    exchange = EXCHANGES[trial.way]()
    given = {"timeout": timedelta(seconds=_TIMEOUT_S), "checksums": trial.checksums}
    handle: Any
    if trial.way == LOCALLY:
        handle = local_steps(
            model, optimizer, exchange, every=EVERY, **keywords(**given)
        )
    else:
        handle = attach(model, exchange, **keywords(bucket_cap_mb=0.008, **given))
    begin()
    draw, digest = torch.Generator().manual_seed(rank), 0
    for step in range(NUM_STEPS):
        x = torch.randn(8, 12, generator=draw)
        y = torch.randint(4, (8,), generator=draw)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            for param in model.parameters():
                digest = zlib.crc32(param.detach().numpy().tobytes(), digest)
    handle.synchronize()
    handle.detach()
    return digest


class Trials:
    """Carries trials out, with ranks forked from one process that has loaded the
    library.
    """

    def __init__(self, folder: Path) -> None:
        self._library, self._folder = built(folder), folder
        # of the processes that start from here on
        os.environ["LD_PRELOAD"] = str(self._library)
        self._calm: dict[tuple[str, bool], list[Outcome | None]] = {}

    def calm(self, way: str, checksums: bool) -> list[Outcome]:
        """The outcomes of a way's ranks where nothing flips."""
        if (way, checksums) not in self._calm:
            trial = Trial(-1 - len(self._calm), way, checksums, victim=0)
            self._calm[way, checksums] = self._lived(trial, [-1] * WORLD)[0]
        found = [
            one
            for one in self._calm[way, checksums]
            if one is not None and not one.error
        ]
        assert len(found) == WORLD, self._calm[way, checksums]
        return found

    def verdict(self, trial: Trial) -> tuple[str, str, str]:
        """The outcome, the part of the call that was hit ("" for none), and all that
        was told.
        """
        calm = self.calm(trial.way, trial.checksums)
        calls = [-1] * WORLD
        calls[trial.victim] = int(trial.call * calm[trial.victim].calls)
        outcomes, codes, hit = self._lived(trial, calls)
        reported = f"{trial}, calls {calls}, {hit}: {outcomes} {codes}"
        return judged(trial, calm[0].digest, outcomes, codes, hit), hit[:6], reported

    def _lived(
        self, trial: Trial, calls: Sequence[int]
    ) -> tuple[list[Outcome | None], list[int | None], str]:
        report = self._folder / f"{trial.number} {trial.checksums}"
        ranks = Ranks(WORLD)
        try:
            given = str(self._library), str(report), trial, calls
            found = ranks.outcomes(struck, *given, timeout_s=_PATIENCE_S)
        finally:
            ranks.close()
        return (
            [one.value for one in found],
            [one.exit_code for one in found],
            report.read_text(),
        )


def judged(
    trial: Trial,
    digest: int,
    outcomes: Sequence[Outcome | None],
    codes: Sequence[int | None],
    struck: str,
) -> str:
    """The verdict on a trial; ``digest`` is that of the parameters without a flip."""
    if any(one is None for one in outcomes):
        return (
            "killed"
            if any(code and code < 0 and code != -9 for code in codes)
            else "hung"
        )
    found = [one for one in outcomes if one is not None]
    if not struck:
        return "not struck"
    if errors := [one for one in found if one.error]:
        named = {(one.error, one.ranks) for one in errors} == {
            ("RankFailed", (trial.victim,))
        }
        unharmed = all(one.digest == digest for one in found if not one.error)
        return "named" if named and unharmed else "noticed"
    digests = {one.digest for one in found}
    if len(digests) > 1:
        return "diverged"
    return "no effect" if digests == {digest} else "wrong"


def measure(
    trials: int, seed: int, at_once: int, announce: Callable[[str], None]
) -> list[Row]:
    """Two rows a side, for bits of payloads and of gloo's headers: a count for each
    verdict.
    """
    rows: list[Row] = []
    with (
        TemporaryDirectory(prefix="gradwire-flips-") as name,
        ThreadPoolExecutor(at_once) as pool,
    ):
        made = Trials(Path(name))
        for checksums in (False, True):
            accidents = [drawn(seed, number, checksums) for number in range(trials)]
            for way in {trial.way for trial in accidents}:
                made.calm(way, checksums)
            counts: dict[str, Counter[str]] = {
                "payload": Counter(),
                "header": Counter(),
            }
            for what, part, reported in pool.map(made.verdict, accidents):
                counts[part if part == "header" else "payload"][what] += 1
                announce(f"{what}: {reported}")
            for part, count in counts.items():
                side = "with checksums" if checksums else "without"
                rows.append(
                    {"name": f"{part}, {side}", **{key: count[key] for key in VERDICTS}}
                )
    return rows


def main() -> None:
    """Measures as the command line says, and prints the rows."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=60)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--at-once", type=int, default=2)
    options.add_argument("--verbose", action="store_true", help="print each trial")
    chosen = options.parse_args()
    announce = print if chosen.verbose else lambda text: None
    for row in measure(chosen.trials, chosen.seed, chosen.at_once, announce):
        print(row, flush=True)


if __name__ == "__main__":
    main()
