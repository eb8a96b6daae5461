"""The errors of gradwire-bench."""

from gradwire.errors import ExitCode, GradwireError


class TestbedUnavailable(GradwireError, RuntimeError):
    """Shaped hosts cannot be made on this machine."""

    exit_code = ExitCode.UNAVAILABLE
    __test__ = False  # pytest must not collect it
