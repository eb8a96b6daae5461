"""The library's tests under other versions: ``nox -s "tests-3.11(torch='2.14.1')"``.

Each session makes an environment with one Python and one build of torch, and runs the tests that
docs/versions.md counts. A build of torch takes up to 6 GB of disk; run one session at a time.
``nox -s tests -- -k topk`` hands pytest its words.
"""

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.14.1")
TESTS = ("tests/laws", "tests/compress", "tests/exchange", "tests/kernels", "tests/runtime")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """Laws, compressors, exchanges, kernels and the runtime."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[dev]", "-e", "lab", "-e", "bench")
    words = session.posargs or ("-m", "not slow")
    session.run("python", "-m", "pytest", "-q", "-n2", "--dist=loadgroup", *TESTS, *words)


@nox.session(python=PYTHONS)
def alone(session: nox.Session) -> None:
    """The library without the lab and the benchmarks, from its wheel."""
    session.install(".[dev]")
    session.run("python", "-m", "pytest", "-q", "-p", "tests.library_alone", "tests/exchange")
