"""What CompLL's language has in the lab: operators, coders of packed bytes, programs of matrices.

Importing a file registers its own operators.
"""

from __future__ import annotations

from pathlib import Path

from gradwire.dsl.symbols import LANGUAGE

LANGUAGE.append(str(Path(__file__).parent))
