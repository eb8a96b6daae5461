"""The entry point: verbs are found, errors become exit codes, help imports no verb."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import typer

from gradwire import __version__
from gradwire.cli import main as entry
from gradwire.contract import registry
from gradwire.contract.registry import Home
from gradwire.errors import ExitCode, GradwireError, InvalidSetting, RankFailed
from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]


def _verb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    """Adds a verb ``try-it`` that raises ``error``."""
    path = tmp_path / "try_it.py"
    path.write_text('"""Try it out."""\n')
    module = ModuleType("gradwire.cli.commands.try_it")
    module.__spec__ = spec_from_file_location(module.__name__, path)
    app = typer.Typer()

    @app.command()
    def try_it(count: int = 1) -> None:
        if error is not None:
            raise error
        print(f"count {count}")

    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    home = Home(module.__name__, "try_it", "gradwire")
    monkeypatch.setattr(entry, "verbs", lambda: {"try-it": home})
    monkeypatch.setattr(entry, "app", _application())


def _application() -> typer.Typer:
    application = typer.Typer(
        cls=entry.Verbs, no_args_is_help=True, pretty_exceptions_enable=False
    )
    application.callback()(entry.options)
    return application


def test_every_file_is_a_verb_with_one_line_of_help(gradwire: Run) -> None:
    ended = gradwire("--help")
    assert ended.code == 0
    for name, home in entry.verbs().items():
        assert name in ended.out
        assert entry.summary(home).split()[0] in ended.out
    assert {"list", "doctor"} <= set(entry.verbs())
    assert "main" not in entry.verbs()


def test_every_verb_has_an_app_and_help(gradwire: Run) -> None:
    for name in entry.verbs():
        ended = gradwire(name, "--help")
        assert ended.code == 0, name
        assert name in ended.out


def test_help_imports_no_verb(gradwire: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [home.module for home in entry.verbs().values()]
    for module in homes:
        monkeypatch.delitem(sys.modules, module, raising=False)
    gradwire("--help")
    assert [module for module in homes if module in sys.modules] == []


def test_the_option_version_prints_the_version(gradwire: Run) -> None:
    assert gradwire("--version").out == f"gradwire {__version__}\n"


def test_a_verb_gets_its_options_and_ends_in_0(
    gradwire: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _verb(monkeypatch, tmp_path, None)
    ended = gradwire("try-it", "--count", "3")
    assert (ended.code, ended.out) == (0, "count 3\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidSetting("density must be in (0, 1], got 4; write density=0.04"), 2),
        (GradwireError("the ranks did not meet"), 1),
        (RankFailed("rank 2 of 4 stopped answering"), ExitCode.RANK_LOST),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    gradwire: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    code: int,
) -> None:
    _verb(monkeypatch, tmp_path, error)
    ended = gradwire("try-it")
    assert (ended.code, ended.out, ended.err) == (code, "", f"gradwire: {error}\n")


def test_our_own_mistakes_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _verb(monkeypatch, tmp_path, RuntimeError("a bug"))
    monkeypatch.setattr(sys, "argv", ["gradwire", "try-it"])
    with pytest.raises(RuntimeError, match="a bug"):
        entry.main()


@each(
    "words, said",
    [
        (("lst",), "list"),
        (("list", "--jsn"), "--json"),
        (("list", "planets"), "did you mean 'planner'?"),
    ],
)
def test_mistyped_commands_end_in_2_with_what_there_is(
    gradwire: Run, words: tuple[str, ...], said: str
) -> None:
    ended = gradwire(*words)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_without_a_verb_the_help_is_shown(gradwire: Run) -> None:
    ended = gradwire()
    assert "doctor" in ended.out + ended.err


def test_a_command_of_a_package_that_is_not_installed_names_the_package(
    gradwire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: ())
    monkeypatch.setattr(entry, "app", _application())
    ended = gradwire("demo")
    assert ended.code == 2
    assert "command 'demo' needs gradwire-bench, which is not installed" in ended.err
