"""The command line as a program of its own."""

from __future__ import annotations

import without_torch  # noqa: F401  (must come before gradwire)

from gradwire.cli.main import main

main()
