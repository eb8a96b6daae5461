"""Mutation testing: which small faults in the library do the tests notice?

Mutants are a seeded draw of cosmic-ray's (``pip install cosmic-ray pytest-cov``).
First, tests record what they reach; then each mutant meets the tests that reach its
line, the shortest of each function first::

    python -m pytest -n0 -m 'not slow' --cov=src/gradwire --cov-context=test \
        --junitxml=REPORT tests/contract tests/compress ...
    python scripts/mutants.py REPORT RESULTS --num 150 --seed 0

It writes to the sources, one mutant at a time: run it in a copy of the checkout. A
mutant that no test notices in ``--cpu-s`` seconds survives. With ``--again`` the
mutants of an earlier list are tried anew, on other tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cosmic_ray.plugins
import coverage
import pytest
import torch  # noqa: F401 - once here, and not again for each mutant
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

FOLDERS = (
    "compress",
    "collective",
    "exchange",
    "contract",
    "kernels",
    "dsl",
    "planning",
)
LIBRARY = Path("src/gradwire")
MOST_TESTS = 250


def annotations(text: str) -> set[tuple[int, int]]:
    """Places of types, which no run looks at."""
    places: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        for kind in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(kind) if kind is not None else ():
                if hasattr(part, "lineno"):
                    at = range(part.col_offset, part.end_col_offset)
                    places |= {(part.lineno, column) for column in at}
    return places


def sites(
    path: Path, reached: dict[int, list[str]]
) -> dict[tuple[int, int], list[Any]]:
    """Mutants of a file by the place that they change, on lines that a test reaches."""
    text = path.read_text(encoding="utf-8")
    found = defaultdict(list)
    types = annotations(text)
    nodes = list(ast_nodes(get_ast(text)))
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        places = [place for node in nodes for place in kind().mutation_positions(node)]
        for number, (start, _) in enumerate(places):
            if start not in types and any(reached.get(start[0], ())):
                found[start].append(
                    {"file": str(path), "operator": name, "occurrence": number}
                )
    return found


def drawn(data: coverage.CoverageData, num: int, seed: int) -> list[dict[str, Any]]:
    """Places are drawn, and one of each place's mutants; from each folder alike
    many.
    """
    draw = random.Random(seed)
    made = []
    for number, folder in enumerate(FOLDERS):
        by_place = {
            (str(path), *place): mutants
            for path in sorted((LIBRARY / folder).rglob("*.py"))
            for place, mutants in sites(
                path, data.contexts_by_lineno(str(path.resolve()))
            ).items()
        }
        share = (num * (number + 1)) // len(FOLDERS) - (num * number) // len(FOLDERS)
        places = draw.sample(sorted(by_place), share)
        made += [{**draw.choice(by_place[place]), "line": place[1]} for place in places]
    return made


def durations(report: str) -> dict[str, float]:
    """Seconds of each test that passed, by its name."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(case.iter("failure")) and not any(case.iter("error")):
            file = case.get("classname", "").replace(".", "/")
            found[f"{file}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def in_turn(names: set[str], seconds: dict[str, float]) -> list[str]:
    """The shortest case of each function, then the second of each, and so on."""
    functions = defaultdict(list)
    for name in sorted(names & seconds.keys(), key=lambda name: (seconds[name], name)):
        functions[name.split("[")[0]].append(name)
    rounds = zip_longest(*functions.values())
    return [name for each in rounds for name in each if name is not None][:MOST_TESTS]


def noticed(names: list[str], cpu_s: int, log: Path) -> tuple[str, str]:
    """What pytest says of these tests, run in a process of their own, and which of them
    failed.
    """
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = True
        code = pytest.main(
            [*names, "-x", "-q", "-n0", "-pno:cacheprovider", "--timeout=40"]
        )
        os._exit(int(code))
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() - started > 5 * cpu_s:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    output_text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output_text, re.M)
    if code in (0, -signal.SIGXCPU, -signal.SIGKILL):
        return "survived", ""
    if code == pytest.ExitCode.USAGE_ERROR and not failed:
        return "not run", ""  # no test has such a name
    return "killed", failed[-1] if failed else ""  # or the mutant ended the interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("report")
    parser.add_argument("results", type=Path)
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-s", type=int, default=60)
    parser.add_argument("--again", type=Path)
    given = parser.parse_args()
    data = coverage.CoverageData()
    data.read()
    mutants = drawn(data, given.num, given.seed)
    if given.again:
        mutants = json.loads(given.again.read_text(encoding="utf-8"))
    seconds = durations(given.report)
    done = []
    for mutant in mutants:
        path = Path(mutant["file"])
        reached = data.contexts_by_lineno(str(path.resolve())).get(mutant["line"], [])
        names = in_turn({name.split("|")[0] for name in reached}, seconds)
        text = path.read_text(encoding="utf-8")
        made = mutate_code(
            text,
            cosmic_ray.plugins.get_operator(mutant["operator"])(),
            mutant["occurrence"],
        )
        started = time.monotonic()
        try:
            path.write_text(made, encoding="utf-8")
            log = given.results.with_suffix(".log")
            outcome, by = (
                noticed(names, given.cpu_s, log) if names else ("survived", "")
            )
        finally:
            path.write_text(text, encoding="utf-8")
        at = mutant["line"] - 1
        was = text.splitlines()[at : at + 1]
        now = made.splitlines()[at : at + 1]
        found = {
            "outcome": outcome,
            "by": by,
            "tests": len(names),
            "was": was,
            "now": now,
        }
        done.append({**mutant, **found})
        given.results.write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(
            f"{outcome} {time.monotonic() - started:.0f} s {path}:{at + 1} {now}",
            flush=True,
        )
    killed = sum(one["outcome"] == "killed" for one in done)
    print(f"{killed} of {len(done)} killed")


if __name__ == "__main__":
    main()
