"""``make fuzz``: all targets for ten minutes, or one input again.

python -m tests.fuzzing [TARGET] [--seconds 600] [--seed 0] [--workers 2] [--input
NUMBER]
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzzing import sanitizer
from tests.fuzzing.campaign import SHARES, Tried, campaign, fuzz


def announce(tried: Tried) -> None:
    """Prints a row of the table, and the findings below it."""
    rate = tried.num_inputs / max(1e-9, tried.wall_s)
    print(
        f"| {tried.target} | {tried.seed} | {tried.num_inputs:,} | "
        f"{tried.num_refused:,} | "
        f"{tried.wall_s:.0f} | {rate:.0f} | {len(tried.findings)} |",
        flush=True,
    )
    for finding in tried.findings:
        print(finding, flush=True)


def main() -> int:
    """The exit status: 0 where nothing was found, 2 where nothing can be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzzing", description=__doc__
    )
    parser.add_argument(
        "target", nargs="?", help=f"one of {', '.join(SHARES)}; all if left out"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for all targets together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--input", type=int, help="the number of one input to try again"
    )
    given = parser.parse_args()
    if (why := sanitizer.why_not()) is not None:
        print(f"nothing was tried: {why}", file=sys.stderr)
        return 2
    print("| target | seed | inputs | refused | s | inputs a s | findings |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: |")
    if given.input is not None:
        one = fuzz(
            given.target,
            given.seed,
            first=given.input,
            last=given.input + 1,
            seconds=60,
        )
        announce(one)
        return bool(one.findings)
    if given.target is not None:
        all_tried = [fuzz(given.target, given.seed, seconds=given.seconds)]
        announce(all_tried[0])
    else:
        all_tried = [*campaign(given.seconds, given.seed, given.workers, announce)]
    num_inputs = sum(tried.num_inputs for tried in all_tried)
    num_found = sum(len(tried.findings) for tried in all_tried)
    print(f"\n{num_inputs:,} inputs, {num_found} findings")
    return bool(num_found)


if __name__ == "__main__":
    sys.exit(main())
