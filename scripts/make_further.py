"""Writes ``contract/further.json``: names that gradwire's further packages declare.

    python -m scripts.make_further

The library knows these names by the file alone, so that an error can name the package
to install. They are read off the installed packages' entry points.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

from gradwire.contract import registry

FILE = Path(registry.__file__).with_name("further.json")
PACKAGES = ("gradwire-lab", "gradwire-bench")


def declared() -> dict[str, dict[str, str]]:
    """The package of each name that the further packages declare, by group."""
    found = {}
    for kind in (*registry.KINDS.values(), registry.COMMANDS):
        homes = registry.found_of(kind)
        found[kind.group] = {name: home.distribution for name, home in homes.items()}
    found[registry.EXTENSIONS] = {
        point.name: registry.distribution_of(point)
        for point in entry_points(group=registry.EXTENSIONS)
    }
    further = {
        group: {name: package for name, package in names.items() if package in PACKAGES}
        for group, names in found.items()
    }
    return {group: names for group, names in further.items() if names}


def main() -> None:
    """Writes the file."""
    text = json.dumps(declared(), indent=2, sort_keys=True)
    FILE.write_text(f"{text}\n", encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
