"""Imported first by the programs beside it: `gradwire` without its `__init__`, so
without torch.

The testbed does not need torch, and loading it takes longer than all that these
programs do; an unprivileged user may not even be able to read it.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

package = types.ModuleType("gradwire")
package.__path__ = [str(Path(__file__).parents[3] / "src" / "gradwire")]
sys.modules["gradwire"] = package
