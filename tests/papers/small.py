"""The papers' figures in small: tiny trainings, made-up captures, a few models and
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradwire_bench.testbed.hosts import loopback_hosts
from gradwire_bench.workloads.task import (
    Batch,
    TrainingTask,
    class_loss,
    mean_over,
    random_of,
)
from papers.deft import convergence as deft_convergence
from papers.deft import density as deft_density
from papers.deft import error as deft_error
from papers.deft import setting as deft_setting
from papers.frame import Ask, Findings, Row
from papers.hipress import (
    accuracy,
    batch,
    convergence,
    coordinator,
    gpu_use,
    pipeline,
    servers,
    servers_measured,
    sizes,
    speed,
    throughput,
    varied,
)
from papers.hipress.printed import PS_ONEBIT
from papers.hipress.systems import TRAINED
from papers.ssfusion.breakdown import figure13
from papers.ssfusion.collectives import figure9
from papers.ssfusion.convergence import figure12
from papers.ssfusion.degrees import figure2
from papers.ssfusion.duration import figure12_time
from papers.ssfusion.latency import figure4, table3
from papers.ssfusion.profiling import table5
from papers.ssfusion.schemes import figure5
from papers.ssfusion.sizes import table2
from papers.ssfusion.throughput import figure11
from papers.ssfusion.training import Trained
from papers.ssfusion.varied import figure14, figure15, figure16, figure17
from papers.usbyte import bandwidth, blocks, energy, lines, order, overhead, scaling
from papers.usbyte import losses as usbyte_losses
from papers.workloads.applications import text_lstm, text_transformer
from papers.zen import balance as zen_balance
from papers.zen import formats as zen_formats
from papers.zen import hashing as zen_hashing
from papers.zen import losses as zen_losses
from papers.zen import parts as zen_parts
from papers.zen import schemes as zen_schemes
from papers.zen import sparsity as zen_sparsity
from papers.zen import speed as zen_speed
from papers.zen import training as zen_training
from papers.zen.captured_rank import SCHEMES
from papers.zen.captures import Capture
from papers.zen.training_model import step_row
from tests.bench.testbed.forked import fork_ranks

Measure = Callable[[Ask], Findings]
Measured = Callable[[str, str], Findings]
"""A paper's figure in small, measured once: the fixture ``measured``."""


def ask(folder: Path | None = None, **earlier: Findings) -> Ask:
    return Ask(
        quick=True, report=lambda fraction, what: None, earlier=earlier, folder=folder
    )


# A task that trains in milliseconds, in place of an application's.

WIDTH, CLASSES = 16, 4


def draw(step: int, rank: int, world: int, batch: int) -> Batch:
    inputs = torch.randn(batch, WIDTH, generator=random_of(0, step, rank, world))
    return inputs, inputs[:, :CLASSES].argmax(1)


def tiny(batch: int = 4, seed: int = 0, **sizes: object) -> TrainingTask:
    """Which of the first inputs is the largest."""
    held_out = draw(1_000_000, 0, 1, 100)
    return TrainingTask(
        name="argmax",
        description="which input is the largest",
        make_model=lambda: nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        ),
        make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        batch=partial(draw, batch=batch),
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, held_out, 100),
        metric="loss",
        seed=seed,
    )


def as_tiny(application: deft_setting.Application) -> deft_setting.Application:
    """The application as the tiny task, whose data are made here."""
    return replace(
        application,
        make=tiny,
        full={"batch": 4},
        quick={"batch": 4},
        density=0.05,
        num_quick_steps=5,
        num_quick_ranks=4,
        missing=lambda: None,
    )


# DEFT, HiPress, SSFusion, US-Byte

RESNET, LSTM, NCF = APPS = tuple(map(as_tiny, deft_setting.APPLICATIONS))
DEFT: dict[str, Measure] = {
    "figure1": partial(deft_density.figure1, app=RESNET, num_steps=3),
    "figure3": partial(deft_convergence.figure3, apps=APPS),
    "figure4": partial(deft_density.figure4, apps=APPS),
    "figure5": partial(deft_error.figure5, apps=APPS),
    "figure6": partial(deft_error.figure6, apps=(RESNET, LSTM)),
    "figure8": partial(deft_convergence.figure8, app=LSTM),
    "figure10": partial(deft_convergence.figure10, app=LSTM),
}
HIPRESS_TRAINED = convergence.Trained(
    "argmax", tiny, 20, 10, "terngrad", PS_ONEBIT, "lstm", less_is_better=True
)


def played_pipeline(asked: Ask) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "open_hosts", loopback_hosts)
        return pipeline.pipeline(asked, model="googlenet", compute_s=0.1)


def played_servers(asked: Ask) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers_measured, "open_hosts", loopback_hosts)
        return servers_measured.servers_measured(asked, models=("googlenet",))


HIPRESS: dict[str, Measure] = {
    "pipeline": played_pipeline,
    "servers_measured": played_servers,
    "batch": batch.batch,
    "servers": servers.servers,
    "table1": throughput.table1,
    "table6": sizes.table6,
    "figure9": partial(
        throughput.figure9, trained={"lstm": TRAINED["lstm"]}, sizes=(2, 4)
    ),
    "figure10": partial(gpu_use.figure10, num_hosts=4),
    "figure11": partial(
        throughput.figure11, trained={"vgg19": TRAINED["vgg19"]}, sizes=(2,)
    ),
    "coordinator": partial(coordinator.coordinator, num_ranks=2),
    "figure13": partial(speed.figure13, numel=2**14, rounds=4, num_hosts=2),
    "figure14": partial(accuracy.figure14, sizes=(2**15, 2**20, 2**26), num_hosts=4),
    "figure15": partial(varied.figure15, num_hosts=2),
    "figure16": partial(convergence.figure16, models=(HIPRESS_TRAINED,), num_hosts=2),
}
SSFUSION_TRAINED = Trained("argmax", tiny, 6, 3, "resnet152", (), less_is_better=True)
SLOWER = {
    "dgc": 1.0,
    "gaussiank": 1.5,
    "redsync": 1.2,
    "sidco": 2.0,
    "localrandomk": 0.5,
}
SSFUSION: dict[str, Measure] = {
    "figure2": partial(figure2, models=("resnet152",), degrees=(20, 100)),
    "figure4": partial(figure4, sizes=(2**8, 2**12, 2**14)),
    "table2": table2,
    "figure5": partial(figure5, models=("resnet152",)),
    "table3": table3,
    "figure9": figure9,
    "figure11": partial(figure11, models=("vit_large",), ranks=(8, 16)),
    "figure12": partial(figure12, models=[SSFUSION_TRAINED]),
    "figure12_time": partial(figure12_time, models=("lstm",), num_ranks=4),
    "figure13": partial(figure13, models=("resnet152",), num_ranks=8),
    "figure14": partial(figure14, models=("resnet152",), num_ranks=8, slower=SLOWER),
    "figure15": partial(figure15, num_ranks=4),
    "figure16": partial(figure16, models=("lstm",), num_ranks=8),
    "figure17": partial(figure17, models=("gpt2_xl",), num_ranks=4),
    "table5": partial(table5, models=("resnet152",), num_ranks=8),
}


def forked12(asked: Ask) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch, usbyte_losses)
        return usbyte_losses.figure12(asked, nodes=(2,), num_images=64, goal=2.3)


def played17(asked: Ask) -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "open_hosts", loopback_hosts)
        return energy.figure17(asked, models=("googlenet",), compute_s=0.1)


USBYTE: dict[str, Measure] = {
    "figure9": lines.figure9,
    "figure10": partial(scaling.figure10, models=("vgg16",), ranks=(2, 8), trials=1),
    "table5": partial(overhead.table5, models=("vgg16", "googlenet"), repeats=2),
    "figure12": forked12,
    "figure11": partial(bandwidth.figure11, models=("vgg16",), ranks=(2, 8), trials=1),
    "figure13": partial(order.figure13, orders=200),
    "figure14": partial(
        bandwidth.figure14, models=("resnet50", "vgg16"), rates_gbit=(10, 20, 60, 100)
    ),
    "figure15": partial(
        blocks.figure15, models=("vgg16", "googlenet"), sizes_mbit=(0.1, 8.0)
    ),
    "figure16": partial(blocks.figure16, models=("vgg16",), sizes_mbit=(0.5, 8.0)),
    "figure17": played17,
    "figure18": partial(scaling.figure18, models=("vgg16",), ranks=(8, 32)),
}

# ZEN

RANKS = 32
MODELS = ("lstm", "transformer")


def made(name: str, num_units: int, width: int, kept: int) -> Capture:
    """Zipf's law over the units: low numbers are in every rank's gradient, high ones in
    few.
    """
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, num_units + 1)
    units = tuple(
        np.sort(
            random.choice(num_units, kept, replace=False, p=weights / weights.sum())
        ).astype(np.int32)
        for _ in range(RANKS)
    )
    return Capture(name, "made up", num_units, width, units)


SMALL_LSTM = partial(text_lstm, vocabulary=200, embedding=8, hidden=8, num_held_out=8)
TASKS = (
    *(SMALL_LSTM, SMALL_LSTM),
    partial(text_transformer, vocabulary=200, width=8, num_held_out=8),
)
LOSSES = tuple(
    replace(part, task=task) for part, task in zip(zen_losses.PARTS, TASKS, strict=True)
)
"""Figure 18's parts, each on a model of a few thousand elements."""


def speed_rows() -> tuple[Row, ...]:
    """Rows as the benchmark gives them, for one model."""
    speedups = dict.fromkeys(SCHEMES, 1.0) | {
        "dense": 1.0,
        "zen_in_coo": 6.0,
        "zen_paper": 7.0,
    }
    return tuple(
        {
            "name": f"lstm, {scheme}",
            "tensor": "lstm",
            "scheme": scheme,
            "num_hosts": 16,
            "link_bytes_per_s": 1e6,
            "speedup_vs_dense": value,
            "busiest_bytes": 1000 / value / (2 if value > 1 else 1),
        }
        for scheme, value in speedups.items()
    )


FIGURE_15 = Findings(speed_rows(), zen_speed.claims15(speed_rows()))


def trained(asked: Ask, part: zen_training.Part) -> tuple[list[Row], bool]:
    """A row as a measurement on two hosts gives it."""
    step_s = {scheme: 2.0 - 0.1 * at for at, scheme in enumerate(zen_training.SCHEMES)}
    return [step_row("measured", "lstm", 2, step_s, 0.5)], True


DENSITIES = (0.01, 0.05, 0.4, 0.6, 0.95)
ZEN: dict[str, Measure] = {
    "figure2a": lambda asked: zen_sparsity.figure2a(asked, MODELS),
    "figure2b": lambda asked: zen_sparsity.figure2b(asked, MODELS),
    "figure3a": lambda asked: zen_sparsity.figure3a(asked, MODELS),
    "figure3b": lambda asked: zen_sparsity.figure3b(asked, MODELS),
    "figure8": lambda asked: zen_schemes.figure8(asked, MODELS, (4, 32)),
    "theorem2": lambda asked: zen_balance.theorem2(asked, MODELS, (4, 16), numel=2**16),
    "figure15": lambda asked: FIGURE_15,
    "figure16": lambda asked: zen_hashing.figure16(asked, numel=200_000),
    "figure17a": lambda asked: zen_formats.figure17a(
        asked, DENSITIES, MODELS, numel=2**14
    ),
    "figure17b": lambda asked: zen_parts.figure17b(
        replace(asked, earlier={"figure15": FIGURE_15}), MODELS
    ),
    "figure18": lambda asked: zen_losses.figure18(asked, LOSSES, num_steps=20),
    **{
        name: partial(zen_training.figure, name=name, run=trained)
        for name in zen_training.PARTS
    },
}

SMALL = {
    "deft": DEFT,
    "hipress": HIPRESS,
    "ssfusion": SSFUSION,
    "usbyte": USBYTE,
    "zen": ZEN,
}
