"""Inputs of several commands: options, a profile, a cluster, settings of a planner or a
compressor.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradwire.contract.bounds import check_whole
from gradwire.contract.units import parse_rate, split
from gradwire.errors import InvalidSetting, invalid
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, check_rate
from gradwire.planning.data.profile import Profile
from gradwire.planning.data.stored import MOST_RANKS

if TYPE_CHECKING:
    from torch import nn

RANKS = 8
RATE = "10gbit"
_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
}


def option(help_text: str, *names: str) -> Any:
    """An option of a command, with its help, and names where these are not the
    argument's.
    """
    return typer.Option(*names, help=help_text)


def load_or_read(model: str) -> Profile:
    """The catalogue's profile of that name, whatever files there are; else that of a
    file.

    Raises ``UnknownName`` where there is neither, unless ``model`` ends as a profile's
    file does.
    """
    is_path = model.endswith(".json") or Path(model).is_file()
    if is_path and model not in catalogue.names():
        return Profile.load(model)
    return catalogue.load(model)


def read_cluster(
    path: Path | None,
    num_ranks: int | None,
    rate: str | None,
    delay_ms: float | None = None,
) -> Cluster:
    """The cluster of a file, at another size, rate or delay where one is given; else
    one as stated.
    """
    if delay_ms is not None:
        near = read_cluster(path, num_ranks, rate)
        return near.scaled(latency_s=delay_ms / 1e3)
    rate_bytes_per_s = None
    if rate is not None:
        rate_bytes_per_s = parse_rate(rate)
    if num_ranks is not None:
        check_whole("ranks", num_ranks, "write --ranks 8", most=MOST_RANKS)
    if rate_bytes_per_s is not None:
        check_rate("rate", rate_bytes_per_s)
    if path is None:
        return Cluster(
            num_ranks=RANKS if num_ranks is None else num_ranks,
            rate_bytes_per_s=parse_rate(RATE)
            if rate_bytes_per_s is None
            else rate_bytes_per_s,
        )
    cluster = Cluster.load(path)
    if num_ranks is None and rate_bytes_per_s is None:
        return cluster
    return cluster.scaled(num_ranks=num_ranks, rate_bytes_per_s=rate_bytes_per_s)


def read_settings(texts: Sequence[str]) -> dict[str, object]:
    """Settings from words such as ``credit=4``; sizes may carry their unit.

    >>> read_settings(["credit=4", "partition_bytes=4MiB"])
    {'credit': 4, 'partition_bytes': 4194304}
    """
    values: dict[str, object] = {}
    for word in texts:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise invalid("--set", word, "name=value", "write --set credit=4")
        values[name] = _value(name, text)
    return values


def read_speeds(text: str | None, num_ranks: int) -> list[float]:
    """Each rank's speed, as a factor of the profile's.

    >>> read_speeds("1,0.25", 2), read_speeds(None, 3)
    ([1.0, 0.25], [1.0, 1.0, 1.0])
    """
    words = ["1"] * num_ranks
    if text is not None:
        words = text.split(",")
    accepted = f"{num_ranks} numbers above 0, one for each rank"
    try:
        speeds = [float(word) for word in words]
    except ValueError:
        speeds = []
    if len(speeds) != num_ranks or not all(0 < speed < inf for speed in speeds):
        raise invalid("--speeds", text, accepted, "write --speeds 1,1,0.25,0.25")
    return speeds


def _value(name: str, text: str) -> object:
    if name.endswith("_bytes"):
        return parse_bytes(text)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text


def parse_bytes(text: str) -> int:
    """Reads a size such as ``25mb`` or ``4MiB``; returns bytes.

    >>> parse_bytes("4MiB")
    4194304
    """
    parts = split(text)
    if parts is None or (parts[1] or "b") not in _BYTES or parts[0] < 0:
        raise invalid(
            "size", text, "a number with B, kB, MB, GB, KiB, MiB or GiB", "write 25MB"
        )
    return round(parts[0] * _BYTES[parts[1] or "b"])


# ---- a user's model and step --------------------------------------------------------


Made = tuple["nn.Module", Callable[[], object]]


def from_file(where: str) -> Made:
    """The (model, step) that ``function`` of ``FILE.py`` returns."""
    from torch import nn

    name, _, function = where.rpartition(":")
    path = Path(name)
    remedy = (
        "write gradwire profile train.py:build, where build() returns (model, step)"
    )
    if not path.is_file():
        raise invalid(
            "model", where, "FILE.py:function with a file that exists", remedy
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise invalid("model", where, "FILE.py:function with a Python file", remedy)
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: its neighbours can be imported, and classes find
    # their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise invalid("model", where, f"a function that {path.name} defines", remedy)
    made: Any = build()
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], nn.Module)
        and callable(made[1])
    ):
        raise InvalidSetting(
            f"{function}() of {path.name} must return (model, step), a torch.nn.Module "
            f"and a callable, got {type(made).__name__}; {remedy}"
        )
    return made
