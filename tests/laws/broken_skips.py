"""Deliberately wrong backups: each puts back something else than what was not taken."""

from __future__ import annotations

from collections.abc import Collection

from gradwire.runtime.step.backup import Backup
from gradwire_lab.laws.skipped import Job


class PutsNothingBack(Backup):
    """Takes a skipped step for one that was taken."""

    def decide(self, names: Collection[str], *, is_skipped: bool) -> None:
        super().decide(names, is_skipped=False)


class PutsAllBack(Backup):
    """Undoes the whole message where one optimizer was skipped, as if ranks had seen an
    inf.
    """

    def decide(self, names: Collection[str], *, is_skipped: bool) -> None:
        super().decide(self._names if is_skipped else names, is_skipped=is_skipped)


class PutsTheLastPassBack(Backup):
    """Undoes one pass of a step that has several."""

    def keep(self) -> None:
        self.forget()
        super().keep()


class PutsATakenStepBack(Backup):
    """Copies nothing anew of parameters whose step was taken, while others are
    undecided.
    """

    def keep(self) -> None:
        if not self.undecided:
            super().keep()
        self.undecided = {*self._names}


class LetsTheRestGoOn(Backup):
    """Puts parameters back one by one, and never what belongs to the whole message."""

    def decide(self, names: Collection[str], *, is_skipped: bool) -> None:
        self._goes_on = True
        super().decide(names, is_skipped=is_skipped)


def job_with(backup: type[Backup]) -> type[Job]:
    """A job whose messages have this kind of backup."""
    return type(f"With{backup.__name__}", (Job,), {"make_backup": backup})


BROKEN = (
    PutsNothingBack,
    PutsAllBack,
    PutsTheLastPassBack,
    PutsATakenStepBack,
    LetsTheRestGoOn,
)
