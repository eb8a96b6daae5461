"""The cost of a message, as a command shows it."""

from ...planning.data.fit import LineFit
from .table import Row


def line_row(name: str, line: LineFit) -> Row:
    """A verb's line over the bytes of its messages, as a row."""
    return {
        "name": name,
        "alpha_s": line.alpha_s,
        "beta_s_per_byte": line.per_unit_s,
        "fraction_residual": line.residual,
    }
