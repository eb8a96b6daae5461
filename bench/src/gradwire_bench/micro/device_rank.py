"""A rank of ``bench device``: it trains one transformer by DDP, by DDP's hooks and by
gradwire.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.runtime.attach import attach
from gradwire_bench.testbed.ranks import Json, Report
from gradwire_bench.training.trainer import under_ddp, under_powersgd
from gradwire_bench.workloads.gpt import GPT

WARM_UP = 2
"""The steps of each side that are not measured: PowerSGD's hook travels dense in
them.
"""
_CONTEXT = 256
_BATCH = 4
_VOCABULARY = 20480
_RANK = 4
"""The rank of PowerSGD."""


def _gradwire(codec: Compressor, model: nn.Module) -> nn.Module:
    attach(model, codec)
    return model


_MADE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": under_ddp,
    "ddp-fp16": partial(under_ddp, hook=default_hooks.fp16_compress_hook),
    "ddp-powersgd": partial(under_powersgd, first=WARM_UP, rank=_RANK),
    "gradwire, int8": partial(_gradwire, int8()),
    "gradwire, onebit": partial(_gradwire, onebit()),
    "gradwire, topk": partial(_gradwire, topk()),
}
SIDES = tuple(_MADE)
"""The ways to average, DDP first."""


def measure(settings: Json, report: Report) -> Json:
    """This rank's seconds a step of each side, one side after the other, and the
    model's size.
    """
    torch.set_num_threads(1)
    seconds = dict[str, list[float]]()
    num_parameters = 0
    known = ""
    for place, side in enumerate(SIDES):
        report(place / len(SIDES), f"{known}{side} begins")
        torch.manual_seed(0)
        plain = GPT(
            _CONTEXT,
            settings["width"],
            settings["num_layers"],
            settings["width"] // 64,
            _VOCABULARY,
        ).to(settings["device"])
        num_parameters = sum(param.numel() for param in plain.parameters())
        model = _MADE[side](plain)
        seconds[side] = _steps(model, settings["device"], settings["steps"])
        known = f"{side} {1 / median(seconds[side]):.3g} steps a second; "
        report((place + 1) / len(SIDES), known)
        del model, plain
    return {"seconds": seconds, "num_parameters": num_parameters}


def _steps(model: nn.Module, device: str, count: int) -> list[float]:
    """The seconds of each step, until the device is done with it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    taken = []
    for step in range(WARM_UP + count):
        tokens_BT = torch.randint(
            _VOCABULARY, (_BATCH, _CONTEXT + 1), generator=draw
        ).to(device)
        dist.barrier()
        start_s = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scores_BTV = model(tokens_BT[:, :-1])
            loss = functional.cross_entropy(
                scores_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= WARM_UP:
            taken.append(time.perf_counter() - start_s)
    return taken
