"""local_steps: ranks train alone, and exchange pseudo-gradients once in some steps.

Source: Stich, ICLR 2019 (LocalSGD); Douillard et al. 2023, arXiv 2311.08105 (DiLoCo);
Douillard et al. 2025, arXiv 2501.18512, algorithm 2 (Streaming DiLoCo: fragments,
delay, mixing); Sarfi et al. 2025, arXiv 2508.15706 (SparseLoCo: sparsified and
quantised pseudo-gradients, error feedback). Differences: fragments are runs of
parameters of about equal size in order of registration, and not sets of transformer
blocks; error feedback keeps all that was not sent (SparseLoCo lets it decay).

Each parameter costs memory for an anchor, for the outer optimizer's state (with
momentum as much again), and for its place in a message. While it travels, it also costs
its pseudo-gradient. All of these are float32 for parameters of 16 bits. For others
``outer_dtype`` keeps anchors and state in 16 bits, and ``outer_device`` keeps all of
these on the host. All ranks begin with rank 0's buffers, such as the statistics of a
batch norm. Later each rank keeps its own buffers. Embeddings travel whole, also with
``sparse=True``. The optimizer may hold only some of the model's parameters; other
optimizers' are exchanged too. A step that a ``GradScaler`` skips is no local step, and
ranks that skip different numbers of steps do not end together. Train in bfloat16, which
needs no scaler.

An island is the ranks of a site that hold one model together. Rank i of an island
exchanges its shards with rank i of the others, and steps the anchors of these shards.

A ``DistributedDataParallel`` model, such as a framework makes, exchanges nothing itself
until ``detach()``, unless its ranks are one host of ``mesh``. Call ``end_period()``
before that, as DDP expects the same parameters on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ...contract import Compressor, Exchange
from ...contract.spec import NamedParam
from ...errors import invalid
from ...exchange.error_feedback import chooser_of
from ...exchange.rounds import NEVER, Rules, codec_for_rounds, row_of_newcomer
from ..attach import grid_of, newcomer_of
from ..engine.engine import Engine
from ..fused import fused_messages
from ..grid.dtensors import num_cuts
from ..grid.shards import averages_in_host
from ..handle import Handle
from ..liveness.membership import Membership
from ..pairs import Feature
from ..settings import FailurePolicy, Options, Settings, or_defaults, takes_options
from ..step.hooked import params_of
from ..step.integrity import DEFAULT_CHECK_EVERY
from ..step.messages import Message
from ..step.progress import Progress
from ..step.refusals import quietened, refuse_complex, sole_ddp
from ..step.report import Check
from ..transport.wire import Group
from .counting import Counting
from .going_on import channel_of
from .lock_step import LocalAttachment, LocalSteps, Rhythm, count_local_steps
from .outer import DILOCO, PLAIN, MakeOuter, Outer
from .partial_steps import PartialSteps, refuse_mixed, rules_of


@takes_options
def local_steps(  # noqa: PLR0913
    model: nn.Module,
    optimizer: Optimizer,
    exchange: Exchange | Compressor | str,
    *,
    every: int,
    outer: MakeOuter | None = None,
    outer_dtype: torch.dtype | None = None,
    outer_device: torch.device | str | None = None,
    fragments: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    quorum: int | None = None,
    grace: float | str = "adaptive",
    weights: str = "equal",
    merge: str = "mean",
    tape: Callable[[str], object] | None = None,
    group: Group | DeviceMesh | None = None,
    mesh: DeviceMesh | str | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
) -> LocalSteps:
    """Lets ranks train alone, and exchanges pseudo-gradients once in ``every`` steps.

    The loop stays as it is on one rank. After each ``every``-th ``optimizer.step()``
    ranks exchange pseudo-gradients. A pseudo-gradient is the anchor (the parameter
    after the last exchange) minus the parameter. The outer optimizer steps anchors by
    the mean, and training goes on from the new anchors. All ranks pass the same
    arguments. Without ``quorum`` they also make the same number of steps. If all ranks
    later load weights by ``load_state_dict`` of the model, anchors restart at these
    weights.

    Args:
        model: A module, or a DDP model, whose all-reduce is then switched off. Only a
            DDP model whose group is one host of ``mesh`` goes on averaging there.
        optimizer: The optimizer that the loop steps. If the loop makes a new one of the
            same parameters, its steps count from its second step on.
        exchange: A compressor, an exchange, or the name of a compressor.
        every: The number of local steps between two exchanges.
        outer: A function that makes the outer optimizer of a list of anchors. None (the
            default) is DiLoCo's,
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
            With a quorum the default is ``functools.partial(torch.optim.SGD, lr=1.0)``:
            anchors become the mean of the ranks' parameters (LocalSGD). If ``every`` is
            small, ``lr=1.0, momentum=0.4`` suits it.
        outer_dtype: ``torch.bfloat16`` or ``torch.float16``, for parameters of 32 bits:
            the dtype of anchors and of the outer optimizer's state. A pseudo-gradient
            is then off by up to ``torch.finfo(outer_dtype).eps / 2`` of the parameter.
            None (the default): float32.
        outer_device: "cpu": anchors, the outer optimizer and the buffers of messages
            lie in host memory, and the host computes them. None (the default): they lie
            on the model's device.
        fragments: The number of parts of the model. The parts are exchanged in turn,
            one after every ``every`` / ``fragments`` steps. Default: 1.
        delay: Local steps from the launch of a fragment until its mean takes effect. It
            is less than the steps between two launches. Default: 0.
        mixing: The weight of the local parameter when its mean takes effect, from 0 to
            below 1. The mean has the rest. Default: 0.5 with a delay, 0 without.
        quorum: The number of ranks whose pseudo-gradients a mean waits for. Each rank
            then trains on at its own speed, and waits for no other rank. If a rank is
            late for a mean, its pseudo-gradient counts in the next mean. None (the
            default): lock step, in which the slowest rank sets the pace.
        grace: Seconds that a mean waits for further ranks once it has its quorum.
            "adaptive" (the default): up to a second, by the measured times of steps.
        weights: A rank's weight in a mean: "equal" (the default), "tokens", or
            "tokens_per_step", which is tokens^2 / steps. The last two need
            ``count_tokens`` of the handle.
        merge: How a quorum's pseudo-gradients are averaged. "mean" (the default), or
            "rda": lengths and directions are averaged separately, for each tensor.
        tape: A function that gets a line of JSON for each mean that takes effect on
            this rank. Default: none.
        group: As for ``attach``. If FSDP2 or tensor parallelism cuts the model within a
            site, this is the mesh dimension of sites. Default: all ranks.
        mesh: As for ``attach``. Default: each rank exchanges by itself.
        options: Only ``trace_steps``; without a quorum also ``bucket_cap_mb``,
            ``num_channels`` and ``compress_if``. Default: ``gw.Options()``.
        failure: Only ``timeout`` and ``store``; without a quorum also ``checksums``,
            and with a quorum also ``on_failure`` and ``rejoin``. Under "shrink" the
            others then train on without a lost rank, and a new process may join.
            Default: ``gw.FailurePolicy()``.

    Returns:
        The handle. Call its ``end_period()`` on all ranks at the end of training. To
        evaluate, use its ``anchors()``, or the model, which has this rank's own
        parameters.

    Raises:
        InvalidSetting: A value is not accepted.
        RanksDiffer: Ranks passed different models or settings.
        RankFailed: Raised by ``optimizer.step()`` if a rank is lost, or takes longer
            than the time-out. Under "shrink" it is raised only if this rank cannot go
            on with the others.
        LoopMistake: Raised by ``optimizer.step()`` on all ranks if only some ranks have
            loaded weights or called ``end_period()``, if they have loaded different
            weights, or if the ranks of an island have made different steps.

    >>> import torch
    >>> import gradwire as gw
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> compressor = gw.compress.uniform(bitwidth=4)
    >>> handle = gw.local_steps(model, optimizer, compressor, every=10)
    >>> for step in range(25):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> handle.stats()["steps"], handle.stats()["exchanges"]
    (25, 2)
    >>> handle.end_period()  # on all ranks, which now have the same parameters
    >>> torch.equal(handle.anchors()["weight"], model.weight)
    True
    >>> handle.detach()
    """
    settings = Settings(exchange, None, None, *or_defaults(options, failure))
    newcomer = newcomer_of(settings, optimizer, (group, mesh), asks_again=True)
    model = sole_ddp(model)
    is_island = averages_in_host(model, mesh)
    asked = {
        "every": every,
        "fragments": fragments,
        "delay": delay,
        "mixing": mixing,
        "quorum": quorum,
        "grace": grace,
        "weights": weights,
        "merge": merge,
        "tape": tape,
        "outer_dtype": outer_dtype,
        "outer_device": outer_device,
    }
    with ExitStack() as quiet:
        if outer is None:
            outer = DILOCO if quorum is None else PLAIN
        way = _Locally(optimizer, outer, asked, quiet)
        inner = quietened(model, quiet, goes_on=is_island)
        # a DDP model's own group is that of its host
        grid = grid_of(inner if is_island else model, group, mesh, settings)
        handle = way.attach(inner, settings, grid, newcomer)
    assert isinstance(handle, LocalSteps)
    return handle


class _Locally(LocalAttachment):
    """An attachment that exchanges pseudo-gradients, once in ``every`` steps."""

    way = Feature.LOCAL_STEPS

    def __init__(
        self,
        optimizer: Optimizer,
        make: MakeOuter,
        asked: dict[str, Any],
        quiet: ExitStack,
    ) -> None:
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            # Accelerate's wrappers have them
            optimizer = getattr(optimizer, "optimizer", optimizer)
        self.inner = optimizer
        self._make = make
        self._quiet = quiet
        self._asked = asked
        self.quorum = asked["quorum"]
        self.tape = asked["tape"]

    def prepare(self) -> Mapping[str, object]:
        params = self.params
        refuse_complex(
            params,
            "under local_steps",
            "call gw.attach, or keep real and imaginary parts",
        )
        if not hasattr(self.inner, "_optimizer_step_post_hooks"):
            remedy = "pass the one that your loop steps, without wrappers"
            kind = type(self.inner).__name__
            raise invalid("optimizer", kind, "a torch.optim.Optimizer", remedy)
        known = {id(param) for _, param in params}
        own = params_of(self.inner)
        if strange := [p for p in own if p.requires_grad and id(p) not in known]:
            given = f"one with {len(strange)} parameters that the model lacks"
            accepted = (
                "one whose parameters are all the model's, as the others would "
                "drift apart"
            )
            raise invalid(
                "optimizer", given, accepted, "pass a model that holds all of them"
            )
        asked = self._asked
        if asked["mixing"] is None:
            asked["mixing"] = 0.5 if asked["delay"] else 0.0
        self.rhythm = Rhythm(
            asked["every"], asked["fragments"], asked["delay"], asked["mixing"]
        )
        self.outer = Outer(
            params, self._make, asked["outer_dtype"], asked["outer_device"]
        )
        self.fragments = cut_into(params, self.rhythm.fragments)
        self.rules = self._rules()
        shared = {key: value for key, value in asked.items() if key != "tape"}
        return {
            **shared,
            "outer_dtype": str(asked["outer_dtype"]),
            "outer_device": str(asked["outer_device"]),
            "outer": self.outer.settings,
            "optimizer": type(self.inner).__name__,
        }

    def _rules(self) -> Rules | None:
        """The rules of rounds with a quorum; None in lock step."""
        rules = rules_of(self._asked, self.rhythm)
        if rules is not None:
            refuse_mixed(self.params)
            self.codec = codec_for_rounds(self.settings.exchange)
        return rules

    def messages(self, who: Membership) -> list[Message]:
        if self.rules is not None:
            if self.newcomer is None:
                self.rules.check_world(who.world)
            return []
        settings = self.settings
        sent = self.outer.sent
        cuts = {name: num_cuts(param) for name, param in self.params}
        exchange = settings.exchange
        if len({*cuts.values()}) > 1 and chooser_of(exchange) is not None:
            raise invalid(
                "exchange",
                exchange,
                "one without adapt, which would choose other settings for copies of a "
                "layer on each rank of an island",
                "pass what it adapts",
            )
        made: list[Message] = []
        # Ranks of an island that hold copies of a part need the same draws for it. A
        # draw depends on a part's place among all that is sent, so parts with most
        # copies come first: shards before them may have other lengths on each rank.
        for count in sorted({*cuts.values()}):
            for names in self.fragments:
                parts = [(n, sent[n]) for n in names if cuts[n] == count]
                made += fused_messages(
                    self.model,
                    [(name, part) for name, part in parts if part.numel()],
                    settings,
                    exchange,
                    who,
                    first=len(made),
                )
        return made

    def heal(self, healing: object, messages: object, engine: Engine) -> Any:
        assert self.newcomer is not None
        self.channel = channel_of(engine)
        row = row_of_newcomer(self.rhythm.fragments)
        return {"rank": self.newcomer.offer.labels[-1], "met": NEVER, "row": row}

    def check(self) -> Check:
        """The comparison of shared tensors, about as often as under ``attach``."""
        return Check(
            max(1, DEFAULT_CHECK_EVERY // self.rhythm.every), self.outer.shared
        )

    @property
    def optimizer(self) -> Optimizer:
        return self.outer.optimizer

    def _handle(self, progress: Progress, undo: ExitStack) -> LocalSteps:
        if self.rules is None:
            return LocalSteps(self, progress, undo)
        return PartialSteps(self, progress, undo)

    def hook(self, progress: Progress, undo: ExitStack) -> Handle:
        undo.enter_context(self._quiet.pop_all())
        self.outer.restart(self.outer.anchors)
        handle = self._handle(progress, undo)
        params = [param for _, param in self.params]
        counting = Counting(self.inner, params, self.rhythm.every)

        count_local_steps(handle, counting, undo)
        return handle


def cut_into(params: Sequence[NamedParam], count: int) -> list[list[str]]:
    """The names of parameters in ``count`` runs of about equal numbers of elements.

    >>> from torch import ones
    >>> cut_into([("a", ones(4)), ("b", ones(3)), ("c", ones(1)), ("d", ones(7))], 2)
    [['a', 'b', 'c'], ['d']]
    """
    if count > len(params):
        accepted = f"at most {len(params)}, the number of parameters"
        raise invalid("fragments", count, accepted, "take fewer")
    made: list[list[str]] = []
    left = sum(param.numel() for _, param in params)
    rest = list(params)
    for num_left in range(count, 0, -1):
        run: list[str] = []
        target = left / num_left
        taken = 0
        while len(rest) >= num_left and (taken < target or not run):
            name, param = rest.pop(0)
            run.append(name)
            taken += param.numel()
        left -= taken
        made.append(run)
    made[-1] += [name for name, _ in rest]
    return made
