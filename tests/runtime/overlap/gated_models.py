"""Models with layers of every usual kind: what an overlapped forward pass may meet."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Net(nn.Module):
    """Layers of every usual kind, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(13))
        self.start = nn.Linear(13, 16)
        self.norm = nn.LayerNorm(16)
        self.body = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, bias=False)
        )
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.norm(torch.tanh(self.start(x * self.scale)))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One matrix under two names, used a third time by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            self.two(torch.tanh(self.one(torch.tanh(self.start(x))))), self.one.weight
        )


class Attention(nn.Module):
    """Its projection out is used without being called; in evaluation a whole layer
    is.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 16)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 24, dropout=0.0, batch_first=True
        )
        self.extra = nn.ParameterList([torch.ones(16), torch.zeros(16)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.start(x).unsqueeze(1))
        return y.squeeze(1) * self.extra[0] + self.extra[1]


class Checkpointed(Net):
    """Runs its body a second time in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.start(x * self.scale)))
        if torch.is_grad_enabled():
            y = checkpoint(self.body, y, use_reentrant=self.reentrant)
        else:
            y = self.body(y)
        return self.last(y)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


class Selective(Net):
    """Keeps the sums of a forward pass for the backward pass, in the order in which
    they come.

    ``momentum`` makes sums too, in the midst of it; they must not be taken for these.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.start(x * self.scale)))
        context = partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor]
        )
        y = checkpoint(self._residual, y, use_reentrant=False, context_fn=context)
        return self.last(y)  # type: ignore[no-any-return]

    def _residual(self, y: Tensor) -> Tensor:
        return torch.tanh(y + self.body(y)).square()


class Normed(Net):
    """Weights that are made of others by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.utils.parametrizations.weight_norm(self.start)


MODELS = [Net, Tied, Attention, Checkpointed, Reentrant, Selective, Normed]
