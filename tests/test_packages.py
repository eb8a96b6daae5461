"""A stranger's package is found once it is installed; the library works without the
lab.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from gradwire.runtime.agreement.versions import TRIED

ROOT = Path(__file__).parents[1]

WITHOUT = """
import importlib, importlib.metadata, pkgutil, sys

importlib.metadata.entry_points = lambda **_: ()

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gradwire_lab", "gradwire_bench"):
            raise ModuleNotFoundError(f"{name} is kept out", name=name)

sys.meta_path.insert(0, Refused())
import gradwire

frameworks = ("gradwire.integrations.", "gradwire.dsl.gpu.")
frameworks += ("gradwire.kernels.sparse.permutation_device",)
for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
    if not module.name.startswith(frameworks):
        importlib.import_module(module.name)
"""


def test_the_declared_versions_are_those_of_the_table() -> None:
    """The table has each pair that ``nox`` makes; the range that warns has its ends."""
    rows = re.findall(
        r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+) \|",
        (ROOT / "docs/versions.md").read_text(encoding="utf-8"),
        re.M,
    )
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    made = re.findall(r'^ {4}\("(\d+\.\d+)", "([\d.]+)"\),$', text, re.M)
    assert {(python, torch) for torch, python in rows} == set(made)

    tried = {
        "torch": sorted({tuple(map(int, torch.split(".")[:2])) for torch, _ in rows}),
        "Python": sorted({tuple(map(int, python.split("."))) for _, python in rows}),
    }
    assert {name: (found[0], found[-1]) for name, found in tried.items()} == TRIED
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    oldest = {name: ".".join(map(str, found[0])) for name, found in tried.items()}
    assert declared["requires-python"] == f">={oldest['Python']}"
    assert f"torch>={oldest['torch']}" in declared["dependencies"]
    named = re.findall(r"Python :: (\d+\.\d+)", "\n".join(declared["classifiers"]))
    assert named == [".".join(map(str, one)) for one in tried["Python"]]


def test_each_package_says_that_it_is_typed() -> None:
    found = {path.parent.name for path in ROOT.glob("**/src/gradwire*/py.typed")}
    assert found == {"gradwire", "gradwire_lab", "gradwire_bench"}


def test_no_module_of_the_library_imports_a_further_package() -> None:
    """In a process that has imported nothing yet."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=100)


STRANGERS = """
import sys, torch, torch.distributed as dist
import gradwire as gw
from gradwire.cli.main import main

path = sys.argv[1]
for words in (["list", "sevenths", "--json"], ["greet"]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    print("----")
store = dist.FileStore(path, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
handle = gw.attach(model, "sevenths")
model(torch.ones(4)).sum().backward()
print(handle.exchange)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_package_of_a_stranger_adds_a_compressor_and_a_command(
    tmp_path: Path,
) -> None:
    """Built and installed by pip, in an environment of its own that sees this one's
    packages.
    """
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    own = sysconfig.get_paths()["purelib"]
    (site / "this.pth").write_text(
        f"import site; site.addsitedir({own!r})\n", encoding="utf-8"
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
    ]
    given = ["--no-build-isolation", str(ROOT / "examples" / "own_package")]
    subprocess.run([*pip, *given], check=True, timeout=120)

    done = subprocess.run(
        [str(python), "-c", STRANGERS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    listed, greeted, attached = done.stdout.split("----\n")
    assert "own-package" in listed
    assert "sevenths" in greeted
    assert "sevenths" in attached
