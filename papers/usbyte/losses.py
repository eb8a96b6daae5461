"""Figure 12 of US-Byte: loss over epochs on 2, 4 and 8 nodes, of a small model on real
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import run_ranks

from ..frame import QUARTER, Ask, Claim, Findings, Row
from ..rows import POINTS, draw, number

NODES = (2, 4, 8)
NATIVE, OWN = SIDES = ("DDP", "US-Byte")
RATE_BYTES_PER_S = 1.25e8
NUM_IMAGES = 4096
BATCH = 32
NUM_EPOCHS = {False: 12, True: 3}
"""By ``quick``."""
GOAL = {False: 0.8, True: 1.2}
"""The loss that is to be reached, in nats."""


def figure12(
    ask: Ask,
    nodes: Sequence[int] = NODES,
    num_images: int = NUM_IMAGES,
    goal: float | None = None,
) -> Findings:
    """The held-out loss of a convolutional network by epoch, under DDP and by US-Byte's
    plans.
    """
    goal = goal or GOAL[ask.quick]
    rows = list[Row]()
    notes = list[str]()
    for done, num_nodes in ask.each(nodes):
        settings = {
            "num_images": num_images,
            "batch": BATCH,
            "num_epochs": NUM_EPOCHS[ask.quick],
            "sides": SIDES,
        }

        def report(
            part: float, what: str, done: float = done, num_nodes: int = num_nodes
        ) -> None:
            ask.report(done + part / len(nodes), f"{num_nodes} nodes, {what}")

        with open_hosts(
            Testbed(hosts=num_nodes, rate_bytes_per_s=RATE_BYTES_PER_S)
        ) as hosts:
            program = f"{__name__}_rank"
            found, *_ = run_ranks(
                hosts, program, settings, report=report, timeout_s=900.0
            )
        rows += [_row(num_nodes, side, found[side], goal) for side in SIDES]
        apart = max(abs(a - b) for a, b in zip(found[NATIVE], found[OWN], strict=True))
        notes.append(
            f"{num_nodes} nodes: {found['messages']} messages a step by US-Byte's "
            f"plan, which was made while the model trained; {found['overlapped']} "
            "steps overlapped the next forward pass; losses differ from DDP's by at "
            f"most {apart:.2g}"
        )
    own = [row for row in rows if row["metric"] == OWN]
    return Findings(tuple(rows), (alike_claim(own, goal),), tuple(notes))


def _row(num_nodes: int, side: str, losses: Sequence[float], goal: float) -> Row:
    points: list[Any] = [[epoch, loss] for epoch, loss in enumerate(losses, 1)]
    return {
        "name": f"{num_nodes} nodes",
        "application": "convolutional network",
        "metric": side,
        "last_loss": losses[-1],
        "epochs_to_goal": epochs_to(losses, goal),
        POINTS: points,
    }


def epochs_to(losses: Sequence[float], goal: float) -> float | None:
    """Epochs until the loss reaches the goal, by lines between epochs; None if it never
    does.

    >>> epochs_to([2.0, 1.0, 0.5], 0.75), epochs_to([2.0, 1.0], 0.5)
    (2.5, None)
    """
    for epoch, loss in enumerate(losses, 1):
        if loss <= goal:
            before = losses[epoch - 2] if epoch > 1 else loss
            return (
                epoch - (goal - loss) / (before - loss)
                if before > goal
                else float(epoch)
            )
    return None


def alike_claim(rows: Sequence[Row], goal: float) -> Claim:
    """Whether more nodes reach the goal in as many epochs."""
    reached = [
        number(row, "epochs_to_goal")
        for row in rows
        if row["epochs_to_goal"] is not None
    ]
    in_words = ", ".join(f"{epochs:.1f}" for epochs in reached)
    alike = len(reached) == len(rows) and max(reached) <= (1 + QUARTER) * min(reached)
    return Claim(
        "statistical performance is almost linear: more nodes reach a loss in "
        "as many epochs",
        "section 6.3, figure 12",
        f"a loss of {goal:g} after {in_words or 'no'} epochs",
        alike,
        ""
        if alike
        else "the batch of all nodes grows with them, so an epoch has fewer steps",
        f"the most is at most {1 + QUARTER:g} times the least",
    )


draw12 = partial(
    draw, title="Loss by epoch", x_label="epochs", y_label="held-out loss, nats"
)
