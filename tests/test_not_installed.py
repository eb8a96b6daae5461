"""Where an optional package is missing: what needs it says so, and what to install.

Each is hidden from the import system, so these tests run whether or not it is there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gradwire.compress.uniform import uniform
from gradwire.contract.trace.span import Span, Trace
from gradwire.dsl.interp import Call, Draws
from gradwire.errors import InvalidSetting, NotInstalled
from gradwire.kernels import libraries as gpu
from gradwire.planning.data.cluster import Cluster
from gradwire_bench.cli.demo import write
from gradwire_bench.demo import demo
from gradwire_bench.micro.kernel_peers import check_compiles
from gradwire_bench.report import figure as _figure
from gradwire_bench.report import html
from gradwire_lab.compll_text import compile as text_compiler
from gradwire_lab.compll_text.compile import compile_text
from gradwire_lab.laws.inputs import make_gradient, profile_of
from gradwire_lab.planning.tune import tune
from scripts.catalogue import language
from tests.arch.test_surroundings import optional_packages
from tests.dsl.single_runs import run_of

PROFILE, CLUSTER = (
    profile_of(([2**18], 2e-3, 4e-3)),
    Cluster(num_ranks=8, rate_bytes_per_s=1e9),
)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Hides a package, imported before or not."""

    def hidden(package: str) -> None:
        known = [name for name in sys.modules if name.startswith(f"{package}.")]
        for name in (package, *known):
            monkeypatch.setitem(sys.modules, name, None)

    seen = (gpu.has_triton, text_compiler._parser)
    for found in seen:
        found.cache_clear()
    yield hidden
    for found in seen:
        found.cache_clear()


def write_html() -> object:
    return html.write(
        Path("never.html"),
        title="",
        command="",
        machine={},
        rows=[],
        pictures={},
        notes=[],
    )


def meet(framework: str) -> Callable[[], object]:
    """Imports the file of a framework, as if for the first time."""
    name = f"gradwire.integrations.{framework}"

    def afresh() -> object:
        sys.modules.pop(name, None)
        return import_module(name)

    return afresh


NEEDED: dict[str, tuple[Callable[[], object], ...]] = {
    "accelerate": (meet("accelerate"),),
    "lightning": (meet("lightning"),),
    "matplotlib": (lambda: _figure.new_figure(1),),
    "jinja2": (write_html,),
    "lark": (
        lambda: compile_text("void encode(float* gradient, uint8* compressed) { }"),
    ),
    "optuna": (lambda: tune("usbyte", PROFILE, CLUSTER),),
    "transformers": (
        language.bert_base,
        language.bert_large,
        language.gpt2,
        meet("transformers"),
    ),
    "triton": (lambda: check_compiles("cuda"),),
}


def test_every_optional_package_is_here() -> None:
    assert set(NEEDED) == optional_packages()


@pytest.mark.parametrize(
    ("package", "use"), [(p, use) for p in NEEDED for use in NEEDED[p]]
)
def test_what_needs_a_package_says_what_to_install(
    package: str, use: Callable[[], object], hide: Callable[[str], None]
) -> None:
    hide(package)
    with pytest.raises(
        NotInstalled, match=rf"{package}, .*not installed; run: pip install"
    ):
        use()


def test_without_triton_the_interpreter_serves_a_gpu_with_one_warning(
    hide: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hide("triton")
    monkeypatch.setattr(Call, "on_cpu", False)
    codes, grad_N = (
        torch.zeros(25, dtype=torch.uint8),
        make_gradient("normal", 100, torch.float32),
    )
    operands = {
        "gradient": grad_N,
        "low": torch.zeros(1),
        "gap": torch.zeros(1),
        "codes": codes,
    }
    made = uniform(bitwidth=2).kernels()
    with caplog.at_level(logging.WARNING, "gradwire"):
        run_of(made.built)(made.encode, operands, 100, Draws())
        run_of(made.built)(made.encode, operands, 100, Draws())
    assert codes.any()
    (record,) = [record for record in caplog.records if record.name == "gradwire"]
    assert 'pip install "gradwire[triton]"' in record.getMessage()


def test_without_a_compiler_torch_is_not_asked_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InvalidSetting, match=r"--compiled must be .*apt install g\+\+"):
        check_compiles("cpu")


def test_the_demos_figures_are_not_lost_without_its_report(
    hide: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hide("matplotlib")
    span = Span(rank=0, lane="forward", name="step", start_s=0.0, end_s=1.0)
    outcome = demo.DemoResult(
        [{"name": "ddp"}], {"ddp": Trace.of([span])}, {"ddp": [1.0]}, {"ddp": [0.5]}, []
    )
    assert write(outcome, tmp_path / "report", title="") is None
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["ddp.trace.json"]
    said = capsys.readouterr()
    assert said.out == ""
    assert 'pip install "gradwire[report]"' in said.err
