"""CompLL's language in the lab: coders of packed bytes, and programs of matrices."""

from pathlib import Path

from gradwire.dsl.symbols import LANGUAGE

LANGUAGE.append(str(Path(__file__).parent))
