"""Every rule about the source finds what breaks it, and leaves alone what does not."""

from __future__ import annotations

from collections.abc import Callable

from tests.arch.source import Source, read
from tests.arch.test_glossary import terms, unused
from tests.arch.test_house import (
    FROM_ANYWHERE,
    VAGUE,
    dangling,
    reaches_inside,
    undocumented,
)
from tests.arch.test_imports import (
    private_from_elsewhere,
    uses_distributed,
    wrong_imports,
)
from tests.arch.test_names import ambiguous_functions, doubled_nouns
from tests.arch.test_pages import (
    missing_members,
    missing_names,
    missing_paths,
    unknown_names,
)
from tests.arch.test_surroundings import early_imports, unnamed_encodings, unpickling
from tests.each import each

KNOWN = frozenset({"gradwire.planning.planner.auto", "gradwire.compress._coo"})


def encodings(source: Source) -> list[int]:
    return [*unnamed_encodings(source.tree)]


def late(source: Source) -> list[str]:
    return early_imports(source, frozenset({"optuna"}))


def imported(source: Source) -> list[str]:
    return wrong_imports(source, KNOWN)


def private(source: Source) -> list[str]:
    return private_from_elsewhere(source, KNOWN)


@each(
    "rule, path, wrong, right",
    [
        (imported, "errors.py", "from .contract.units import x", "import torch"),
        (
            imported,
            "planning/simulation/run.py",
            "from ..planner import auto",
            "import torch",
        ),
        (
            imported,
            "contract/spec.py",
            "import gradwire",
            "from ..errors import invalid",
        ),
        (
            imported,
            "contract/spec.py",
            "def f():\n    import gradwire_bench",
            "import torch",
        ),
        (
            imported,
            "contract/spec.py",
            "if TYPE_CHECKING:\n    from ..cli import x",
            "import torch",
        ),
        (
            imported,
            "gradwire_bench/a.py",
            "from papers.command import x",
            "import gradwire.errors",
        ),
        (
            uses_distributed,
            "a.py",
            "from torch import distributed",
            "from torch import Tensor",
        ),
        (uses_distributed, "a.py", "torch.distributed.barrier()", "torch.ones(1)"),
        (
            private,
            "exchange/a.py",
            "from ..compress._coo import x",
            "from ..compress import x",
        ),
        (
            encodings,
            "a.py",
            "path.write_text(text)",
            "path.read_text(encoding='utf-8')",
        ),
        (encodings, "a.py", "open(path)", "open(path, mode='rb')"),
        (encodings, "a.py", "path.open()", "path.open('wb')\ngzip.open(path)"),
        (unpickling, "a.py", "from dill import load", "import json"),
        (
            unpickling,
            "a.py",
            "dist.all_gather_object(told, own)",
            "dist.all_gather(told, own)",
        ),
        (unpickling, "a.py", "torch.load(file)", "torch.load(file, weights_only=True)"),
        (late, "a.py", "from optuna.samplers import x", "def f():\n    import optuna"),
        (late, "a.py", "import optuna", "if TYPE_CHECKING:\n    import optuna"),
        (dangling, "a.py", '"""Of a step."""', '"""A step."""'),
        (
            unknown_names,
            "a.py",
            '"""Calls ``vanished_name``, as `attach` does."""',
            '"""Calls ``attach``, not ``gone.with_dots`` or `two words`."""',
        ),
        (unknown_names, "a.py", '"""The `vanished_name` of a step."""', '"""`len`."""'),
        (undocumented, "a.py", '"""A."""\nclass A: ...', '"""A."""\nclass _A: ...'),
    ],
)
def test_a_rule_of_one_file_finds_what_is_wrong_and_nothing_else(
    rule: Callable[[Source], object], path: str, wrong: str, right: str
) -> None:
    assert rule(read(path, wrong))
    assert not rule(read(path, right))


def test_rules_of_several_files_find_what_is_wrong() -> None:
    inner = read(
        "a.py", "class A:\n    def __init__(self):\n        self._x = self.y = 1\n"
    )
    outer = read("b.py", "def f(a):\n    return a.y + a._x + a._modules\n")
    assert reaches_inside([inner, outer]) == ["b.py:2 a._x"]
    nouns = [
        read("a.py", "class Message: ..."),
        read("b.py", "Message = tuple[int]\nSIZES = 1"),
    ]
    assert [*doubled_nouns([*nouns, read("c.py", "SIZES = 2")])] == ["Message"]
    drawers = [read(f"cli/{name}.py", "def draw(): ...") for name in "ab"]
    users = [read(f"cli/use_{name}.py", f"from .{name} import draw") for name in "ab"]
    assert [*ambiguous_functions([*drawers, *users])] == ["draw"]
    renamed = read("cli/c.py", "from .b import draw as draw_bars")
    assert ambiguous_functions([*drawers, users[0], renamed]) == {}


@each(
    "rule, wrong, right",
    [
        (
            missing_paths,
            "see sparse/formats/_bits.py",
            "`runtime/engine/engine.py:12` says so",
        ),
        (
            missing_paths,
            "the folder `reproduce/`",
            "`collective/NAME.py`, tests/laws/broken*.py",
        ),
        (
            missing_names,
            "see gradwire.cost.cluster.",
            "see gradwire.contract.Compressor.encode.",
        ),
        (
            missing_members,
            "see ``rewrite.Joint``",
            "`supersteps.Joint`, ``torch.compile``",
        ),
        (VAGUE.search, "string_utils", "strings"),
        (
            FROM_ANYWHERE.search,
            '[sys.executable, "-m", program]',
            "[sys.executable, path]",
        ),
    ],
)
def test_a_rule_of_texts_finds_what_is_wrong_and_nothing_else(
    rule: Callable[[str], object], wrong: str, right: str
) -> None:
    assert rule(wrong)
    assert not rule(right)


def test_the_glossary_is_read_row_by_row() -> None:
    text = (
        "| word | meaning |\n| --- | --- |\n| push, pull | ways |\n| common (DEFT) "
        "| a layer |\n"
    )
    assert terms(text) == ["push", "pull", "common"]
    assert unused(text, "def push(): pull()") == ["common"]
