"""Retry: all ranks repeat a backward pass that has raised on each, or none does.

A batch that is too large for memory ends a backward pass on every rank, and the loop
repeats it with smaller batches. By then some messages have been launched, on each rank
another number of them. So ranks announce in the job's store that they repeat the
pass. When all have announced it they hand in zeros for what did not come, so that every
message ends, and drop the step. A rank that has all of its gradients waits for their
means and repeats nothing: then all raise ``LoopMistake``.
"""

from collections.abc import Sequence

from ...errors import ExitCode, RankFailed
from ..engine.engine import Engine
from ..liveness.alarm import listed


def repeat_together(engine: Engine, step: int, num_messages: int) -> None:
    """Returns once all ranks gave up the open ``step``, of ``num_messages`` messages.

    Raises ``LoopMistake`` on all ranks if one has all its gradients, and ``RankFailed``
    if one is lost or does not come within the time-out.
    """
    engine.begin_call()
    who = engine.who.beside(f"retry {engine.num_calls}")
    mine = f"rank {engine.rank} repeats its backward pass"

    def look(absent: Sequence[int], notes: object) -> None:
        engine.check()
        signs = engine.signs()
        for rank in absent if signs else ():
            place = signs[rank].place
            at = (place.step, place.num_calls)
            is_whole = (
                at == (step, engine.num_calls - 1) and place.launched >= num_messages
            )
            if is_whole or place.step > step:
                raise engine.lose(
                    (engine.rank,),
                    step,
                    f"rank {rank} of {who.world} has all its gradients of this step, "
                    f"and {mine}",
                    "all ranks must repeat it, or none",
                    ExitCode.MISTAKE,
                )
        engine.refuse_silence(step)

    try:
        what = "the retry of a backward pass"
        who.agree("", lambda found: None, engine.timeout, what=what, look=look)
    except RankFailed as error:
        if error.step >= 0:
            raise  # all know it
        if error.__cause__ is not None:  # the store is lost, and perhaps no rank
            what = "repeat a backward pass"
            raise engine.unreachable(what, error.__cause__, step) from error
        absent = who.in_group(error.ranks)
        raise engine.lose(
            absent,
            step,
            f"{mine}, and rank {listed(absent)} of {who.world} does not",
            f"it waited for {engine.timeout}",
            ExitCode.MISTAKE,
        ) from error
