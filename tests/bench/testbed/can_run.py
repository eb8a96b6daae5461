"""Ends well where the Python that runs it can load the testbed and make a user
namespace.

Otherwise it says why not. A user may lack either where root does not: a Python that
only root may read, or a system without user namespaces, as one in a chroot.
"""

import ctypes
import os
import sys

try:
    import without_torch  # noqa: F401, I001  (must come before gradwire)
    import gradwire_bench.testbed.launch  # noqa: F401
except (ImportError, SyntaxError, OSError) as error:
    sys.exit(f"{sys.executable} cannot run the testbed for this user: {error}")

CLONE_NEWUSER = 0x10000000
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
    sys.exit(f"no user namespaces here: {os.strerror(ctypes.get_errno())}")
