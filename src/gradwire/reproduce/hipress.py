"""hipress: tables of HiPress that can be had without its clusters, beside ours.

Source: Wu et al., "HiPress" (IEEE TPDS), section 4.4.
Left out: what its cost model and its training runs give (tables 6 and 7, figures 9 to 16).
"""

from __future__ import annotations

from ._frame import Figure, Reproduction
from ._hipress_lines import table5

ASSUMPTIONS = (
    "A line is one that holds code; blank lines, comments and docstrings do not count. The paper "
    "does not say how it counts; figure 5's encode, 10 lines with its head, is part of TernGrad's "
    "23.",
    "PowerSGD is an exchange of its own here: counted are the functions that compute its factors, "
    "not the verbs between them, as the paper counts encode and decode.",
)

hipress = Reproduction(
    paper="Wu et al., HiPress (IEEE TPDS 2023)",
    assumptions=ASSUMPTIONS,
    figures=(Figure("table5", "lines of code of the algorithms", table5),),
)
