"""Backup: copies of a message's state, by which steps that did not count are undone.

There are two copies. One is from before the open backward pass, which survivors of a
lost rank repeat. The other is from the last step that an optimizer took: a loss scaler
may skip the next step, after one or several passes. A scaler skips by optimizer, and a
message may have parameters of several optimizers. So this copy is kept by parameter. A
parameter is **undecided** from its first exchange until the scaler has decided about
its optimizer's step.

* Skipped: the parameter's fields are put back as they were at its optimizer's last
  step.
* Taken: its fields stay, and are copied anew at the next pass.

Fields that belong to the whole message, such as a counter of draws, go on unless all
parameters were skipped.
"""

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract import State
from ...contract.state import leaves, with_tensors


class Stateful(Protocol):
    """A message, or another object that keeps state by parameter."""

    state: Any
    slots: Any

    def state_of(self, slot: Any, state: Any = None) -> dict[str, Tensor]: ...

    def rest_of_state(self, state: Any = None) -> dict[str, Tensor]: ...


class Backup:
    """The copies of the state of ``owner``, which carries the parameters ``names``."""

    def __init__(self, owner: Stateful, names: Iterable[str]) -> None:
        # The owner has its backup: a cycle would keep buffers until it is collected.
        self._weak_owner = weakref.ref(owner)
        self._names = frozenset(names)
        self.before: State = None
        """The state before the open pass; None if the pass alone cannot be undone."""
        self._taken: State = None
        self.undecided: set[str] = set()
        """The parameters that were exchanged since their optimizer's last step."""
        self._goes_on = False
        """Whether a step of some parameters was taken since the last whole copy."""
        self._spare: list[State] = []
        self._by_step = False
        self._by_pass = False

    @property
    def _owner(self) -> Stateful:
        owner = self._weak_owner()
        assert owner is not None, "a backup is used by its owner"
        return owner

    def begin(self, *, by_step: bool, by_pass: bool) -> None:
        """Opens a pass that may be undone, if there is a state.

        A copy ``by_step`` is put back if a scaler skips the step, and a copy
        ``by_pass`` if the pass is repeated.
        """
        has_state = any(leaves(self._owner.state))
        self._by_step = by_step and has_state
        self._by_pass = by_pass and has_state

    @property
    def is_due(self) -> bool:
        """Whether the open pass may be undone, and no copy was made for that yet."""
        return self._by_step or self._by_pass

    def keep(self) -> None:
        """Copies the state before the open pass begins to change it.

        In the first pass of a step one copy serves both purposes.
        """
        is_first = self._by_step and not self.undecided
        if self._by_step:
            self._keep_step()
        if self._by_pass:
            self.before = self._taken if is_first else self._copied()
        self._by_step = False
        self._by_pass = False

    def _keep_step(self) -> None:
        owner = self._owner
        if not self.undecided:
            self._taken = self._copied()
        else:
            self._copy_parts(owner.state, self._taken, self._names - self.undecided)
            if self._goes_on:
                self._copy_rest(owner.state, self._taken)
        self.undecided = set(self._names)
        self._goes_on = False

    def end_pass(self, *, undoes: bool = False) -> None:
        """Ends a pass.

        With ``undoes``, a state that had begun to change is put back.
        """
        before = self.before
        self.before = None
        if before is None:
            return
        is_of_step = before is self._taken
        if undoes:
            self._owner.state, before = before, self._owner.state
            if is_of_step:
                self._taken = None
                self.undecided = set()
        if undoes or not is_of_step:
            self._spare.append(before)

    def decide(self, names: Collection[str], *, is_skipped: bool) -> None:
        """Ends a step of some parameters, which was taken or skipped."""
        decided = self.undecided.intersection(names)
        if not decided:
            return
        self.undecided -= decided
        if not is_skipped:
            self._goes_on = True
        elif self.undecided or self._goes_on:
            self._copy_parts(self._taken, self._owner.state, decided)
        else:
            self._owner.state, self._taken = self._taken, self._owner.state
        if not self.undecided:
            self.forget()

    def forget(self) -> None:
        """Settles all parameters' steps as they are, as when a state is loaded."""
        self.undecided = set()
        if self._taken is not None:
            self._spare.append(self._taken)
            self._taken = None

    def without(self, names: Collection[str]) -> State:
        """The state as if the undecided steps of ``names`` were skipped."""
        undecided = self.undecided.intersection(names)
        if not undecided:
            return self._owner.state
        if undecided == self._names and not self._goes_on:
            return self._taken
        made = _copy(self._owner.state, None)
        self._copy_parts(self._taken, made, undecided)
        return made

    def go_on(self, taken: State, undecided: Collection[str]) -> None:
        """Takes over the step that messages before this one have begun."""
        self.undecided = {*undecided} & self._names
        self._taken = taken if self.undecided else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        before = None if self.before is self._taken else self.before
        copies = [before, self._taken, *self._spare]
        return sum(tensor.nbytes for copy in copies for _, tensor in leaves(copy))

    def _copied(self) -> State:
        return _copy(self._owner.state, self._spare.pop() if self._spare else None)

    @torch.no_grad()
    def _copy_parts(self, given: State, into: State, names: Collection[str]) -> None:
        owner = self._owner
        for slot in owner.slots:
            if slot.name in names:
                parts = owner.state_of(slot, given)
                for path, part in owner.state_of(slot, into).items():
                    part.copy_(parts[path])

    @torch.no_grad()
    def _copy_rest(self, given: State, into: State) -> None:
        rest = self._owner.rest_of_state(given)
        for path, tensor in self._owner.rest_of_state(into).items():
            tensor.copy_(rest[path])


def _copy(state: State, into: State) -> State:
    """A copy of a state, in the tensors of ``into`` if they have its shapes."""
    tensors = [tensor for _, tensor in leaves(state)]
    copies = [tensor for _, tensor in leaves(into)]
    if [one.shape for one in copies] != [one.shape for one in tensors]:
        copies = [torch.empty_like(tensor) for tensor in tensors]
    if tensors:
        torch._foreach_copy_(copies, tensors)
    return with_tensors(state, iter(copies))
