"""Tasks of the papers' applications: each a model of this folder on data that this
machine has.

Sizes are the callers': what trains in minutes on two cores is far smaller than what the
papers trained on many GPUs, and each description says how small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire_bench.workloads import fashion_mnist
from gradwire_bench.workloads.convnet import ConvNet
from gradwire_bench.workloads.lstm import LSTMLM
from gradwire_bench.workloads.task import (
    Batch,
    TrainingTask,
    class_loss,
    mean_over,
    random_of,
)
from gradwire_bench.workloads.transformer import CausalLM

from . import movielens, words
from .deepfm import DeepFM
from .ncf import NeuMF
from .resnet18 import ResNet18
from .words import Words

_EVALUATED = 500
"""Held-out examples at a time."""
NEGATIVES = 4
"""Pairs without a rating that NCF learns from beside each with one (section 4.1 of its
paper).
"""
CANDIDATES = 100
"""Items among which the held-out one is to rank (likewise)."""
LIKED = 4
"""The least rating that counts as a click."""
_MEAN = 0.2860
_DEVIATION = 0.3530
"""The mean and the standard deviation of the pixels of Fashion-MNIST's training images,
scaled to [0, 1].
"""


def click_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy (nats) of one logit for each example."""
    return functional.binary_cross_entropy_with_logits(model(inputs), targets)


def _sgd(
    rate: float, weight_decay: float = 0.0
) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=weight_decay)


def _adam(rate: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return partial(torch.optim.Adam, lr=rate)


def fashion_resnet(
    *,
    width: int = 16,
    stem_stride: int = 1,
    batch: int = 32,
    num_held_out: int = 10_000,
    seed: int = 0,
) -> TrainingTask:
    """ResNet-18 on Fashion-MNIST: accuracy on its first ``num_held_out`` test
    images.
    """
    made = partial(ResNet18, width, stem_stride=stem_stride)
    about = f"ResNet-18 of width {width} (stride {stem_stride} at first)"
    return _fashion("resnet18", about, made, batch, num_held_out, seed)


def fashion_convnet(
    *, width: int = 16, batch: int = 32, num_held_out: int = 10_000, seed: int = 0
) -> TrainingTask:
    """Small convolutional network on Fashion-MNIST, as ``fashion_resnet``."""
    about = f"convolutional network of width {width}"
    return _fashion(
        "convnet", about, partial(ConvNet, width), batch, num_held_out, seed
    )


def _fashion(
    name: str,
    about: str,
    make_model: Callable[[], nn.Module],
    batch: int,
    num_held_out: int,
    seed: int,
) -> TrainingTask:
    train, test = fashion_mnist.load()
    held_out = (
        _scaled(test.images_NCHW[:num_held_out]),
        test.labels_N[:num_held_out].long(),
    )

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
        at = torch.randint(len(train.labels_N), (batch,), generator=random)
        return _scaled(train.images_NCHW[at]), train.labels_N[at].long()

    return TrainingTask(
        name=name,
        description=f"{about} on Fashion-MNIST, {batch} images a rank",
        make_model=make_model,
        make_optimizer=_sgd(0.05, weight_decay=5e-4),
        batch=draw,
        loss=class_loss,
        score=lambda model: mean_over(model, _right, held_out, _EVALUATED),
        metric="accuracy",
        seed=seed,
    )


def _scaled(images_NCHW: Tensor) -> Tensor:
    return (images_NCHW.float() / 255 - _MEAN) / _DEVIATION


def _right(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    right_B: Tensor = model(inputs).argmax(-1) == targets
    return right_B.float().mean()


def text_lstm(
    *,
    vocabulary: int = 10_000,
    embedding: int = 128,
    hidden: int = 256,
    num_layers: int = 1,
    batch: int = 16,
    context: int = 20,
    num_held_out: int = 500,
    seed: int = 0,
) -> TrainingTask:
    """LSTM over words of ``words``: perplexity on ``num_held_out`` windows."""
    made = partial(LSTMLM, vocabulary, embedding, hidden, num_layers)
    about = f"LSTM of {num_layers} x {hidden} over {vocabulary:,} words"
    windows = _Windows(words.load(vocabulary), batch, context)
    return _language("lstm", about, made, _sgd(1.0), windows, num_held_out, seed)


def text_transformer(
    *,
    vocabulary: int = 10_000,
    width: int = 128,
    num_layers: int = 2,
    batch: int = 16,
    context: int = 32,
    num_held_out: int = 500,
    seed: int = 0,
) -> TrainingTask:
    """Causal transformer over words of ``words``: perplexity on ``num_held_out``
    windows.
    """
    made = partial(CausalLM, context, width, num_layers, vocabulary)
    about = f"transformer of {num_layers} x {width} over {vocabulary:,} words"
    windows = _Windows(words.load(vocabulary), batch, context)
    return _language(
        "transformer", about, made, _adam(1e-3), windows, num_held_out, seed
    )


@dataclass(frozen=True)
class _Windows:
    """Batches of windows of ``context`` words, with the words that follow each."""

    words: Words
    batch: int
    context: int

    def at(self, words_N: Tensor, starts_B: Tensor) -> Batch:
        """The windows that begin at these words."""
        window = words_N[starts_B[:, None] + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def drawn(self, random: torch.Generator) -> Batch:
        """A batch of windows for training, drawn anywhere."""
        last = len(self.words.train_N) - self.context
        starts_B = torch.randint(last, (self.batch,), generator=random)
        return self.at(self.words.train_N, starts_B)

    def held_out(self, count: int) -> Batch:
        """About ``count`` held-out windows, side by side."""
        last = len(self.words.held_out_N) - self.context
        starts = torch.arange(0, last, self.context)
        return self.at(self.words.held_out_N, starts[:: max(1, len(starts) // count)])


def _language(
    name: str,
    about: str,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    windows: _Windows,
    num_held_out: int,
    seed: int,
) -> TrainingTask:
    """A language model's training on windows of words."""

    def draw(step: int, rank: int, world: int) -> Batch:
        return windows.drawn(random_of(seed, step, rank, world))

    held_out = windows.held_out(num_held_out)
    return TrainingTask(
        name=name,
        description=f"{about} of Python's library and documentation, "
        f"{windows.batch} x {windows.context} words a rank",
        make_model=make_model,
        make_optimizer=make_optimizer,
        batch=draw,
        loss=class_loss,
        score=lambda model: exp(mean_over(model, class_loss, held_out, 50)),
        metric="perplexity",
        seed=seed,
    )


def movielens_ncf(
    *,
    factors: int = 32,
    batch: int = 512,
    seed: int = 0,
    folder: Path | None = None,
) -> TrainingTask:
    """NeuMF on MovieLens-100K: hit rate at 10 of each user's last item among 99 never
    rated.

    A rank's batch has ``batch`` rated pairs and ``NEGATIVES`` times as many drawn ones.
    """
    data = movielens.load(folder)
    num_users = len(data.user_fields_UF)
    num_items = len(data.item_fields_IF)
    last_N = torch.ones(len(data.users_N), dtype=torch.bool)
    last_N[:-1] = data.users_N[1:] != data.users_N[:-1]
    pairs_N2 = torch.stack([data.users_N, data.items_N], dim=1)
    known_N2 = pairs_N2[~last_N]
    known_UI = torch.zeros(num_users, num_items, dtype=torch.bool)
    known_UI[known_N2[:, 0], known_N2[:, 1]] = True

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
        rated_B2 = known_N2[torch.randint(len(known_N2), (batch,), generator=random)]
        drawn_B2 = rated_B2.repeat(NEGATIVES, 1)
        drawn_B2[:, 1] = torch.randint(num_items, (len(drawn_B2),), generator=random)
        pairs_B2 = torch.cat([rated_B2, drawn_B2])
        return pairs_B2, known_UI[pairs_B2[:, 0], pairs_B2[:, 1]].float()

    candidates = _candidates(pairs_N2[last_N], known_UI)
    return TrainingTask(
        name="ncf",
        description=f"NeuMF of {factors} factors on MovieLens-100K, {batch} ratings "
        f"and {NEGATIVES * batch} drawn pairs a rank",
        make_model=lambda: NeuMF(num_users, num_items, factors),
        make_optimizer=_adam(1e-2),
        batch=draw,
        loss=click_loss,
        score=lambda model: _hit_rate(model, candidates),
        metric="hit rate at 10",
        seed=seed,
    )


def _candidates(last_U2: Tensor, known_UI: Tensor) -> Tensor:
    """(U, CANDIDATES, 2): each user's held-out pair first, then pairs with items never
    rated.
    """
    free_UI = (~known_UI).float()
    free_UI[last_U2[:, 0], last_U2[:, 1]] = 0
    random = torch.Generator().manual_seed(1)
    drawn_UC = torch.multinomial(
        free_UI[last_U2[:, 0]], CANDIDATES - 1, generator=random
    )
    items_UC = torch.cat([last_U2[:, 1:], drawn_UC], dim=1)
    return torch.stack([last_U2[:, :1].expand_as(items_UC), items_UC], dim=2)


@torch.no_grad()
def _hit_rate(model: nn.Module, candidates_UC2: Tensor) -> float:
    logits_UC = model(candidates_UC2.flatten(0, 1)).view(candidates_UC2.shape[:2])
    better_U = (logits_UC[:, 1:] >= logits_UC[:, :1]).sum(1)
    return float((better_U < 10).float().mean())


def movielens_deepfm(
    *,
    embedding: int = 16,
    batch: int = 512,
    seed: int = 0,
    folder: Path | None = None,
) -> TrainingTask:
    """DeepFM on MovieLens-100K: whether a film was liked; loss on every tenth rating.

    Fields are user, film, what is known of both, and two crosses, (user, genre) and
    (film, occupation), as is usual with clicks: 55,934 rows, which are nearly all
    parameters.
    """
    data = movielens.load(folder)
    categories_NF, sizes = _click_fields(data)
    clicks_N = (data.ratings_N >= LIKED).float()
    held_out_N = torch.arange(len(clicks_N)) % 10 == 9
    known_NF = categories_NF[~held_out_N]
    known_N = clicks_N[~held_out_N]
    held_out = (categories_NF[held_out_N], clicks_N[held_out_N])

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
        at = torch.randint(len(known_N), (batch,), generator=random)
        return known_NF[at], known_N[at]

    return TrainingTask(
        name="deepfm",
        description=f"DeepFM of {sum(sizes):,} x {embedding} embeddings on "
        f"MovieLens-100K, {batch} ratings a rank",
        make_model=lambda: DeepFM(sizes, embedding),
        make_optimizer=_adam(1e-3),
        batch=draw,
        loss=click_loss,
        score=lambda model: mean_over(model, click_loss, held_out, _EVALUATED),
        metric="loss",
        seed=seed,
    )


def _click_fields(data: movielens.Ratings) -> tuple[Tensor, list[int]]:
    """Each rating's categories (N, F), and how many each field has."""
    users_NF = data.user_fields_UF[data.users_N]
    items_NF = data.item_fields_IF[data.items_N]
    num_jobs = movielens.USER_FIELDS[2]
    num_genres = movielens.ITEM_FIELDS[0]
    num_users = len(data.user_fields_UF)
    num_items = len(data.item_fields_IF)
    crosses_NF = torch.stack(
        [
            data.users_N * num_genres + items_NF[:, 0],
            data.items_N * num_jobs + users_NF[:, 2],
        ],
        1,
    )
    plain_NF = torch.stack([data.users_N, data.items_N], 1)
    sizes = [num_users, num_items, *movielens.USER_FIELDS, *movielens.ITEM_FIELDS]
    sizes += [num_users * num_genres, num_items * num_jobs]
    return torch.cat([plain_NF, users_NF, items_NF, crosses_NF], 1), sizes
