"""The library's tests under other versions:
``nox -s "tests(python='3.11', torch='2.9.1')"``.

Each session makes an environment with one Python and one build of torch, and runs the
tests that docs/versions.md counts. A build of torch takes up to 6 GB of disk; run one
session at a time. ``nox -s tests -- -k topk`` hands pytest its words.
"""

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PAIRS = (
    ("3.11", "2.9.1"),
    ("3.12", "2.9.1"),
    ("3.11", "2.10.0"),
    ("3.11", "2.11.0"),
    ("3.11", "2.12.1"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.1"),
    ("3.13", "2.15.0"),
    ("3.14", "2.15.0"),
)
TESTS = (
    "tests/compress",
    "tests/exchange",
    "tests/pilot",
    "tests/runtime",
    "tests/laws",
)
SHOWN = ("tests/docs", "tests/integrations", "tests/test_examples.py")


@nox.session
@nox.parametrize("python,torch", PAIRS)
def tests(session: nox.Session, torch: str) -> None:
    """Compressors, exchanges, the runtime and laws; the programs of README and docs."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[dev,frameworks]", "peft", "-e", "lab", "-e", "bench")
    words = session.posargs or ("-m", "not slow")
    session.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-n2",
        "--dist=loadgroup",
        *TESTS,
        *SHOWN,
        *words,
    )


@nox.session(python=PYTHONS)
def alone(session: nox.Session) -> None:
    """The library without the lab and the benchmarks, from its wheel."""
    session.install(".[dev]")
    session.run(
        "python", "-m", "pytest", "-q", "-p", "tests.library_alone", "tests/exchange"
    )
