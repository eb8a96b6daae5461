"""The errors of gradwire-lab."""

from gradwire.errors import ExitCode, GradwireError


class LawBroken(GradwireError, AssertionError):
    """An algorithm breaks a law; the message says what was found of it."""

    exit_code = ExitCode.BROKEN
