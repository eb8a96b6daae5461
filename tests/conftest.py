"""Settings for all tests: every run draws the same examples, and no test depends on who
runs it.

Every process computes with one thread, those that tests start too: two workers of two
threads on two cores wait for each other more than they compute. What a second thread
changes is for the folders of kernels to test, which ask for it (``several_threads``);
idle ones sleep and do not spin.

No process asks a name server. torch's store looks up the name of every address that
connects, and a server that does not answer holds all ranks up for 5 s (pytorch#159007).
Compiled sources are kept, whatever the environment says: each process that tests start
would compile gradwire again.

Where there is no GPU, Triton's own interpreter runs its kernels, on the CPU. What is
defined in triton's language, by itself and by each ``*device.py``, is interpreted only
if it was imported so: before anything else imports it, as parts of torch do. So it is
done here, first of all; the variable is not left behind, for what tests start.

The process that hands all tests on to workers imports neither torch nor what needs it.
"""

# ruff: noqa: E402

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
INTERFACE = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TERMINAL = ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")
SIZE = ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")

# Neither a launcher around pytest nor the terminal it runs on shows through, nor data
# and settings that somebody has put on this machine. Before anything is imported, as
# torch and typer read some of these then. What matplotlib keeps stays in the checkout.
for name in (*LAUNCHER, *INTERFACE, *TERMINAL, *SIZE):
    os.environ.pop(name, None)
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
# A process that looked for GPUs by CUDA itself could fork none that uses them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.update(XDG_DATA_HOME=os.devnull, XDG_DATA_DIRS=os.devnull)
os.environ["MPLCONFIGDIR"] = str(
    Path(__file__).parents[1] / ".pytest_cache" / "matplotlib"
)
os.environ["GRADWIRE_RECORDS"] = str(
    Path(__file__).parents[1] / ".pytest_cache" / "records"
)

import pytest
from hypothesis import settings

from tests.runtime import server


def _hands_tests_on() -> bool:
    """Whether workers of this process run the tests, and not it itself."""
    words = ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("-n", "--numprocesses", default="0")
    known, _ = words.parse_known_args()
    return known.numprocesses != "0" and "PYTEST_XDIST_WORKER" not in os.environ


if not _hands_tests_on():
    import numpy as np
    import torch

    if find_spec("triton") is not None and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            import gradwire.dsl.gpu.device
            import gradwire.kernels.sparse.permutation_device  # noqa: F401

            if find_spec("gradwire_lab") is not None:
                import gradwire_lab.dsl.runs_device
                import gradwire_lab.kernels.hashing_device  # noqa: F401

    # Not in a conftest of their own folder: pytest 9.1 loses such fixtures where a file
    # of this folder stands in the command line between files of that one.
    from tests.runtime.pools import (  # noqa: F401
        doomed,
        doomed_two,
        four,
        late_two,
        one,
        pools,
        ranks_of,
        two,
    )

settings.register_profile("gradwire", derandomize=True, deadline=None, database=None)
settings.load_profile("gradwire")

SLOW_S = 5.0
"""A test that takes longer, alone and with kernels built, carries the mark ``slow``."""
SEVERAL = ("multi", "netns")
"""Marks of tests that start processes of their own."""
FAST = "not slow"
"""The marks that `make test` asks for."""
BESIDE = ("lab", "bench", "papers")
"""Folders of what lies beside the library: `make test` takes their tests marked
``smoke``.
"""


@cache
def _shaped() -> Any:
    """Whether hosts can be shaped here; the library's own tests run where the bench is
    missing.
    """
    from gradwire_bench.testbed.hosts import available

    return available()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after another: those of shaped hosts all, as
    they share the machine's links, and others file by file.

    Of the folders beside the library's, all but smoke tests count as slow.
    """
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in BESIDE and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.slow)
        if any(item.get_closest_marker(mark) is not None for mark in SEVERAL):
            alone = item.get_closest_marker("netns") is not None
            group = "hosts" if alone else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers fork ranks from one server, which imports torch while they collect."""
    node.workerinput["server"] = server.started()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.mixing import Mixed

    return Mixed(config, log) if config.option.dist == "loadgroup" else None


def pytest_configure(config: pytest.Config) -> None:
    if given := getattr(config, "workerinput", {}).get("server"):
        server.share(given)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` imports no file beside the library's that has no smoke test."""
    is_named = collection_path.name in " ".join(config.args)
    is_test = collection_path.match("test_*.py") and not is_named
    if config.option.markexpr != FAST or not is_test:
        return None
    if collection_path.relative_to(Path(__file__).parent).parts[0] not in BESIDE:
        return None
    return "smoke" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_finish() -> None:
    """Nothing that is there before the first test is walked through again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Everything is walked through at the end: libraries look then whether all was
    given back.
    """
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_walked_through() -> None:
    """What the files before have imported is not walked through again, by gc or by an
    attach.
    """
    if gc.isenabled():
        gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``netns`` run where shaped hosts can really be made, those marked
    ``gpu`` where there is a GPU, and they say why elsewhere.
    """
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    if item.get_closest_marker("netns") is not None and not _shaped():
        pytest.skip(_shaped().reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names tests that make everybody wait, and fails none: the first to run builds
    kernels, and starts ranks, and the machine may have more to do.
    """
    for report in terminalreporter.stats.get("passed", []):
        if report.duration > SLOW_S and "slow" not in report.keywords:
            terminalreporter.write_line(
                f"mark it slow: {report.nodeid} {report.duration:.0f} s"
            )


@pytest.fixture
def triton_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels run where their tensors lie; numpy, which computes them then, is
    silent.
    """
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def several_threads() -> Iterator[None]:
    """Two threads for the kernels of a module's tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
