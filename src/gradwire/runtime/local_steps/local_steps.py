"""local_steps: ranks train alone, and exchange pseudo-gradients once in some steps.

Source: Stich, ICLR 2019 (LocalSGD); Douillard et al. 2023, arXiv 2311.08105 (DiLoCo);
Douillard et al. 2025, arXiv 2501.18512, algorithm 2 (Streaming DiLoCo: fragments,
delay, mixing); Sarfi et al. 2025, arXiv 2508.15706 (SparseLoCo: sparsified and
quantised pseudo-gradients, error feedback). Differences: fragments are runs of
parameters of about equal size in order of registration, and not sets of transformer
blocks; error feedback keeps all that was not sent (SparseLoCo lets it decay).

Each parameter costs memory for an anchor, for the outer optimizer's state (with
momentum as much again), and for its place in a message. While it travels, it also costs
its pseudo-gradient. All of these are float32 for parameters of 16 bits. All ranks begin
with rank 0's buffers, such as the statistics of a batch norm. Later each rank keeps its
own buffers. Embeddings travel whole, also with ``sparse=True``. The optimizer may hold
only some of the model's parameters; other optimizers' are exchanged too. A step that a
``GradScaler`` skips is no local step, and ranks that skip different numbers of steps do
not end together. Train in bfloat16, which needs no scaler.

A ``DistributedDataParallel`` model, such as a framework makes, exchanges nothing itself
until ``detach()``. Call ``end_period()`` before that, as DDP expects the same
parameters on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...contract import Compressor, Exchange
from ...contract.bounds import check_whole
from ...contract.spec import NamedParam
from ...errors import invalid
from ...exchange.rounds import Rules, codec_for_rounds
from ..attach import Attachment, grid_of
from ..engine.engine import CONTROL
from ..fused import fused_messages
from ..handle import Handle
from ..liveness.membership import Membership
from ..pairs import Feature
from ..settings import FailurePolicy, Options, Settings, or_defaults, takes_options
from ..state.outer_state import NO_LOADS
from ..state.table import MOST_STEPS
from ..step.hooked import observing
from ..step.hooks import UnattachedParameters
from ..step.integrity import DEFAULT_CHECK_EVERY
from ..step.messages import Message
from ..step.progress import Progress
from ..step.refusals import quietened, refuse_complex, sole_ddp
from ..step.report import Check
from ..transport.task_graph import Task
from ..transport.wire import Group
from .counting import Counting
from .loads import Loads
from .moment import LoopMoment, moments_of_all
from .outer import DILOCO, MakeOuter, Outer


@dataclass(frozen=True)
class Rhythm:
    """The steps at which fragments are exchanged and take effect.

    Raises ``InvalidSetting`` for values that do not fit together. Source: Streaming
    DiLoCo, algorithm 2 (H = ``every``, tau = ``delay``, alpha = ``mixing``).
    """

    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise invalid(
                    name, value, f"an integer of at least {least}", "count local steps"
                )
        if self.every % self.fragments:
            accepted = (
                f"a divisor of every, {self.every}, as fragments take turns evenly"
            )
            raise invalid(
                "fragments", self.fragments, accepted, "change one of the two"
            )
        if self.delay >= self.gap:
            accepted = f"fewer than {self.gap}, the steps from one launch to the next"
            raise invalid(
                "delay", self.delay, accepted, "take a shorter delay or fewer fragments"
            )
        if not (isinstance(self.mixing, int | float) and 0 <= self.mixing < 1):
            accepted = "a number in [0, 1), since 1 would ignore the mean"
            raise invalid("mixing", self.mixing, accepted, "leave it out")

    @property
    def gap(self) -> int:
        """Local steps from one exchange to the next."""
        return self.every // self.fragments

    @property
    def settles(self) -> bool:
        """Whether every parameter is its anchor after each exchange."""
        return self.fragments == 1 and not self.delay and not self.mixing


class LocalSteps(Handle):
    """The handle of ``gw.local_steps``, with the other methods of ``Handle``."""

    def __init__(self, way: _Locally, progress: Progress, undo: ExitStack) -> None:
        exchange = way.settings.exchange
        rhythm = way.rhythm
        self._outer = way.outer
        super().__init__(
            way.model, exchange, progress, None, None, undo, way.run, way.backend
        )
        progress.num_fragments = len(way.fragments)
        self._rhythm = rhythm
        self._fragments = way.fragments
        self._unattached = UnattachedParameters(way.model, way.params, progress.give_up)
        undo.callback(self._unattached.remove)
        self._algorithm = (
            f"local steps with outer {way.outer.settings[0]} through {exchange!r}"
        )
        self._local_step = self._counted_from = 0
        self._position = 0
        """Local steps since the period began, below ``every``."""
        self._arriving: dict[str, Tensor] = {}
        """Pseudo-gradients on their way, by name; their means arrive in place."""
        self._left = 0
        """Local steps until these take effect; 0 where none are on their way."""
        self._announcing: Task | None = None
        """The task in which ranks announce their moments; None without one."""
        self._has_stepped = False
        """Whether an optimizer has stepped since parameters were their anchors."""
        self._loads = Loads(way.model, way.params, self._take_loads, undo)
        self._loads.note()
        this = weakref.ref(self)

        def settle() -> None:
            if (handle := this()) is not None:
                handle._apply(rhythm.mixing)

        undo.callback(settle)

    @property
    def step(self) -> int:
        """Number of local steps so far."""
        return self._local_step

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer, whose parameters are the anchors."""
        return self._outer.optimizer

    def anchors(self) -> dict[str, Tensor]:
        """The anchors by parameter name, the same on all ranks bit for bit.

        They are the parameters that ranks have agreed on, and that DiLoCo evaluates. Do
        not write to them.
        """
        return {name: anchor.detach() for name, anchor in self._outer.anchors.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients stay on this rank until the optimizer steps."""
        yield

    def _count(self, num_steps: int) -> None:
        """Counts the step of an optimizer, and does the work that is due after it.

        ``num_steps`` includes uncounted steps before this one. It is 0 if this step
        does not count.
        """
        self._has_stepped = True
        if not num_steps:
            return
        self._engine.check()
        rhythm = self._rhythm
        self._local_step += num_steps
        self._position += 1
        self._engine.show_local_step(self._local_step)
        if self._left:
            self._left -= 1
            if not self._left:
                self._apply(rhythm.mixing)
        number, rest = divmod(self._position, rhythm.gap)
        if not rest:
            if self._left:  # a state that was saved with a longer delay
                self._apply(rhythm.mixing)
            self._position %= rhythm.every
            self._launch(self._fragments[number - 1], announces=True)
            self._left = rhythm.delay
            if not rhythm.delay:
                self._apply(rhythm.mixing)
            self._has_stepped = not rhythm.settles

    def end_period(self) -> None:
        """Exchanges all parameters now.

        All ranks then have the same parameters, and a new period begins. If no rank has
        made a step since the last exchange of all parameters, nothing happens. All
        ranks must call this between the same two steps, for example at the end of
        training. The call is an exchange, so the training after it differs from a
        training without it.

        Raises:
            LoopMistake: Other ranks have not called it, or ranks have loaded different
                weights.
        """
        self._between_steps("end_period()")
        self._take_loads()
        self._announce(ends_period=True)
        moments = self._hear() or [self._moment(ends_period=True)]
        if not any(moment.has_learnt for moment in moments):
            return
        self._apply(self._rhythm.mixing)
        for names in self._fragments:
            self._launch(names)
            self._apply(0.0)
        self._position = 0
        self._has_stepped = False

    def _moment(self, *, ends_period: bool) -> LoopMoment:
        # Anchors are looked at only where it matters.
        has_learnt = self._has_stepped or bool(self._arriving) or not ends_period
        has_learnt = has_learnt or self._outer.has_learnt()
        return LoopMoment(self._local_step, ends_period, has_learnt, *self._loads.tally)

    def _announce(self, *, ends_period: bool) -> None:
        """Has ranks announce their moments beside the next work."""
        engine = self._engine
        if engine.world > 1:
            moment = self._moment(ends_period=ends_period)
            steps = moments_of_all(engine.world, self._progress.step, moment)
            self._announcing = engine.launch(0, "moments", steps, CONTROL)

    def _hear(self) -> list[LoopMoment]:
        """Waits for the moments that ranks announce; [] if none are on their way."""
        if self._announcing is None:
            return []
        announcing = self._announcing
        self._announcing = None
        self._engine.wait([announcing])
        moments: list[LoopMoment] = announcing.result
        return moments

    def _take_loads(self) -> None:
        """Restarts anchors at the values loaded since the last step.

        Means on their way to loaded parameters are dropped, as they belong to the
        values before.
        """
        if not self._loads.may_be_pending:
            return
        loaded = self._loads.pending()
        dropped = loaded.keys() & self._arriving.keys()
        self._loads.take(loaded, dropped)
        for name in dropped:
            del self._arriving[name]
        self._outer.restart(loaded)

    def _launch(self, names: Sequence[str], *, announces: bool = False) -> None:
        """Sends this rank's pseudo-gradients, and its moment if it ``announces``."""
        self._unattached.before_backward()
        self._progress.begin_step(names)
        if announces:
            self._announce(ends_period=False)
        for name in reversed(names):  # in issue order
            delta = self._arriving[name] = self._outer.pseudo_gradient(name)
            self._synchroniser.ready(name, delta)

    def _apply(self, mixing: float) -> None:
        """Lets the fragment on its way take effect, if there is one."""
        self._hear()
        self.synchronize()
        means = self._arriving
        self._arriving = {}
        self._left = 0
        if means:
            self._outer.apply(means, mixing)

    def synchronize(self) -> None:
        """Waits for means that are on their way. They take effect when they are due."""
        self._progress.finish()

    def stats(self) -> dict[str, Any]:
        """Figures of this rank, as in ``Handle.stats``, for local steps.

        - ``steps`` counts local steps, and ``exchanges`` the steps that exchanged a
          fragment.
        - ``every`` is the period.
        - ``*_per_step`` are per local step. ``step_s`` is the median time between two
          exchanges over the steps between them.
        """
        self.synchronize()
        figures = super().stats()
        steps = self._local_step - self._counted_from
        exchanges = figures["steps"]
        for key in figures:
            if key.endswith("_per_step"):
                figures[key] *= exchanges / max(1, steps)
        figures["step_s"] /= self._rhythm.gap
        return {
            **figures,
            "steps": steps,
            "exchanges": exchanges,
            "every": self._rhythm.every,
        }

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residuals by parameter name: pseudo-gradients not sent yet."""
        self.synchronize()
        return super().residuals()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's local steps: save one file a rank.

        It has anchors, the state of the outer optimizer, residuals, the place in the
        period and pending means. It also has this rank's parameters, which
        ``load_state_dict`` restores. Save buffers and the inner optimizer beside it,
        for each rank too.
        """
        saved = super().state_dict()
        loaded = self._loads.pending()
        arriving = {
            n: mean.clone() for n, mean in self._arriving.items() if n not in loaded
        }
        outer = self._outer.state(restarted=loaded)
        outer |= {"position": self._position, "left": self._left, "arriving": arriving}
        outer["loads"] = self._loads.tally_with(
            loaded, loaded.keys() & self._arriving.keys()
        )
        return {**saved, "local_step": self._local_step, "outer": outer}

    def _shared(self, saved: Mapping[str, Any]) -> dict[str, str]:
        outer = saved["outer"]
        return {
            **super()._shared(saved),
            "position in the period": str(outer["position"]),
            "steps until means take effect": str(outer["left"]),
            "pending means": ", ".join(sorted(outer["arriving"])),
        }

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        put_exchanges = super()._checked(saved, strict)
        local_step: Any = saved.get("local_step")
        outer = saved.get("outer", {})
        put_outer = self._outer.checked(outer)
        remedy = "pass what handle.state_dict() returned"
        check_whole(
            "local_step of the state", local_step, remedy, least=0, most=MOST_STEPS
        )

        def put_in_place() -> None:
            put_exchanges()
            put_outer()
            self._local_step = self._counted_from = local_step
            self._position = outer["position"] % self._rhythm.every
            self._left = outer["left"]
            anchors = self._outer.anchors
            self._arriving = {
                name: torch.empty_like(anchors[name]).copy_(mean)
                for name, mean in outer["arriving"].items()
            }
            self._has_stepped = False
            self._loads.tally = tuple(outer.get("loads", NO_LOADS))
            self._loads.note()

        return put_in_place

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        if not takes_a_torn_step:
            self.synchronize()
        super()._between_steps(what, takes_a_torn_step=takes_a_torn_step)


@takes_options
def local_steps(  # noqa: PLR0913
    model: nn.Module,
    optimizer: Optimizer,
    exchange: Exchange | Compressor | str,
    *,
    every: int,
    outer: MakeOuter = DILOCO,
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
    arguments and make the same number of steps. If all ranks later load weights by
    ``load_state_dict`` of the model, anchors restart at these weights.

    Args:
        model: A module, or a DDP model, which then exchanges nothing itself.
        optimizer: The optimizer that the loop steps. If the loop makes a new one of the
            same parameters, its steps count from its second step on.
        exchange: A compressor, an exchange, or a name.
        every: Local steps between two exchanges.
        outer: A function that makes the outer optimizer of anchors. The default is
            DiLoCo's,
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
            With ``lr=1.0`` alone parameters become the mean of the ranks' (LocalSGD).
            Short periods want ``lr=1.0, momentum=0.4``.
        fragments: The number of parts of the model, which are exchanged in turn: one
            every ``every`` / ``fragments`` steps. Default: 1.
        delay: Local steps from the launch of a fragment until its mean takes effect. It
            is less than the steps between two launches. Default: 0.
        mixing: The share of the local parameter that stays when its mean takes effect.
            The default is 0.5 with a delay, and 0 without.
        quorum: The ranks whose pseudo-gradients a mean waits for. Ranks then train on
            without each other, each at its own speed. A slow rank's part counts in the
            next mean. None (the default): lock step, in which the slowest rank sets the
            pace.
        grace: Seconds that a mean waits for further ranks once it has its quorum.
            "adaptive" (the default): up to a second, from what was measured.
        weights: A rank's weight in a mean: "equal" (the default), "tokens", or
            "tokens_per_step", which is tokens^2 / steps. The last two need
            ``handle.count_tokens``.
        merge: "mean" (the default), or "rda": a mean of lengths and of directions, for
            each tensor.
        tape: A function of a JSON line, which is called for each mean that takes effect
            on this rank. Default: none.
        group: As for ``attach``. Default: all ranks.
        mesh: As for ``attach``. Default: flat.
        options: Only ``bucket_cap_mb``, ``num_channels``, ``compress_if`` and
            ``trace_steps``. Default: ``gw.Options()``.
        failure: Only ``timeout``, ``checksums`` and ``store``. Default:
            ``gw.FailurePolicy()``.

    Returns:
        The handle. Call its ``end_period()`` on all ranks at the end of training.
        Evaluate its ``anchors()``, or the model as it is, which has this rank's own
        parameters.

    Raises:
        InvalidSetting: A value is not accepted.
        RanksDiffer: Ranks passed different models or settings.
        RankFailed: Raised by ``optimizer.step()`` if a rank is lost, or late by the
            time-out.
        LoopMistake: Raised by ``optimizer.step()`` on all ranks if only some ranks have
            loaded weights or called ``end_period()``, or if they have loaded different
            weights.

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
    model = sole_ddp(model)
    grid = grid_of(model, group, mesh, settings)
    asked = {"every": every, "fragments": fragments, "delay": delay, "mixing": mixing}
    partly = {
        "quorum": quorum,
        "grace": grace,
        "weights": weights,
        "merge": merge,
        "tape": tape,
    }
    with ExitStack() as quiet:
        way = _Locally(optimizer, outer, asked, partly, quiet)
        handle = way.attach(quietened(model, quiet), settings, grid)
    assert isinstance(handle, LocalSteps)
    return handle


class _Locally(Attachment):
    """An attachment that exchanges pseudo-gradients, once in ``every`` steps."""

    way = Feature.LOCAL_STEPS
    codec: Compressor
    """The compressor of partial rounds, which have a quorum."""

    def __init__(
        self,
        optimizer: Optimizer,
        make: MakeOuter,
        asked: dict[str, Any],
        partly: dict[str, Any],
        quiet: ExitStack,
    ) -> None:
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            # Accelerate's wrappers have them
            optimizer = getattr(optimizer, "optimizer", optimizer)
        self._optimizer = optimizer
        self._make = make
        self._quiet = quiet
        self._asked = asked
        self._partly = partly
        self.quorum = partly["quorum"]
        self.tape = partly["tape"]

    def prepare(self) -> Mapping[str, object]:
        params = self.params
        refuse_complex(
            params,
            "under local_steps",
            "call gw.attach, or keep real and imaginary parts",
        )
        if not hasattr(self._optimizer, "_optimizer_step_post_hooks"):
            remedy = "pass the one that your loop steps, without wrappers"
            kind = type(self._optimizer).__name__
            raise invalid("optimizer", kind, "a torch.optim.Optimizer", remedy)
        known = {id(param) for _, param in params}
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
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
        self.rhythm = Rhythm(**asked)
        self.outer = Outer(params, self._make)
        self.fragments = cut_into(params, self.rhythm.fragments)
        self.rules = self._rules()
        shared = {key: self._partly[key] for key in self._partly if key != "tape"}
        return {
            **asked,
            **shared,
            "outer": self.outer.settings,
            "optimizer": type(self._optimizer).__name__,
        }

    def _rules(self) -> Rules | None:
        """The rules of rounds with a quorum; None in lock step."""
        from .partial_steps import refuse_mixed, rules_of

        rules = rules_of(self._partly, self.rhythm)
        if rules is not None:
            refuse_mixed(self.params)
            self.codec = codec_for_rounds(self.settings.exchange)
        return rules

    def messages(self, who: Membership) -> list[Message]:
        if self.rules is not None:
            self.rules.check_world(who.world)
            return []
        settings = self.settings
        made: list[Message] = []
        for names in self.fragments:
            made += fused_messages(
                self.model,
                [(name, self.outer.anchors[name]) for name in names],
                settings,
                settings.exchange,
                who,
                first=len(made),
            )
        return made

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
        from .partial_steps import PartialSteps

        return PartialSteps(self, progress, undo)

    def hook(self, progress: Progress, undo: ExitStack) -> Handle:
        undo.enter_context(self._quiet.pop_all())
        self.outer.restart(self.outer.anchors)
        handle = self._handle(progress, undo)
        this = weakref.ref(handle)  # hooks of the process must not keep it
        params = [param for _, param in self.params]
        counting = Counting(self._optimizer, params, self.rhythm.every)

        def before(optimizer: Optimizer, *_: Any) -> None:
            if (living := this()) is not None and counting.enters(optimizer):
                living._take_loads()

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (living := this()) is not None:
                num_steps = counting.leaves(optimizer)
                if num_steps is not None:
                    living._count(num_steps)

        # The hooks change only the parameters of this model, and its optimizer steps as
        # a whole.
        for hook in (
            register_optimizer_step_pre_hook(observing(before)),
            register_optimizer_step_post_hook(observing(after)),
        ):
            undo.callback(hook.remove)
            weakref.finalize(handle, hook.remove)
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
