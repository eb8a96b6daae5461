"""Ends well where the Python that runs it can load the testbed."""

import without_torch  # noqa: F401, I001  (must come before gradwire)
import gradwire.testbed.launch  # noqa: F401
