"""The pictures of the documentation: ``python -m scripts.pictures NAME...`` draws
docs/pictures/.

Each function draws one picture, from a run on this machine, from a simulation, or from
the tables of docs/measured.md. ``timeline`` reads the traces that ``gradwire demo``
left in demo-report/.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.contract.trace.span import Span, Trace
from gradwire_bench.report import bars, curves, timeline
from gradwire_bench.report.figure import (
    FAINT,
    INK,
    SERIES,
    label,
    legend,
    new_figure,
    save,
)
from gradwire_lab.algorithm_page import tables

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
_MULOCO_EVERY_5 = "gradwire, Muon, local steps every 5, 4 bits (`muloco-4bit@5`)"
RATES_BIT = (25e6, 100e6, 500e6, 2e9, 10e9)
_PNG_END = 12
"""Bytes of the last chunk of a PNG."""
NEVER_S = 50
"""Where ``fastest`` marks a method that does not reach the loss."""
_read: list[list[dict[str, str]]] = []
"""The tables that the picture being drawn has read."""


def measured(section: str, *head: str) -> list[dict[str, str]]:
    """The rows of the table of docs/measured.md in a section, whose head begins so.

    The picture then carries a digest of these rows.
    """
    page = tables((ROOT / "docs" / "measured.md").read_text(encoding="utf-8"))
    found = next(
        t for t in page if t.section == section and t.head[: len(head)] == [*head]
    )
    rows = [dict(zip(found.head, row, strict=True)) for row in found.rows]
    _read.append(rows)
    return rows


def draw(name: str, path: Path) -> None:
    """Draws one picture, and writes a digest of the tables that it read into it."""
    _read.clear()
    PICTURES[name](path)
    if not _read:
        return
    digest = sha256(json.dumps(_read).encode()).hexdigest()
    chunk = b"tEXtData\0" + digest.encode()
    length = len(chunk) - len(b"tEXt")
    whole = struct.pack(">I", length) + chunk + struct.pack(">I", crc32(chunk))
    png = path.read_bytes()
    path.write_bytes(png[:-_PNG_END] + whole + png[-_PNG_END:])


def digest_in(path: Path) -> str | None:
    """The digest that ``draw`` wrote into a picture; None without one."""
    found = re.search(rb"tEXtData\0([0-9a-f]{64})", path.read_bytes())
    return found[1].decode() if found else None


def number(text: str) -> float:
    """The number with which a cell begins."""
    return float(text.split()[0])


def choosing(path: Path) -> None:
    """Seconds to DDP's loss at 100 Mbit/s, by method, for two models."""
    names = {
        "DDP": "DDP",
        "DDP, fp16 hook": "16 bits (fp16 hook)",
        "gradwire, uniform (4 bits)": "uniform (4 bits)",
        _MULOCO_EVERY_5: "muloco, every 5",
    }
    tuned = measured("With tuned learning rates and two seeds", "method")
    convnet = measured("For a convolutional network", "method")
    columns = {"GPT": (tuned, "GPT, 100 Mbit/s"), "convnet": (convnet, "100 Mbit/s")}
    rows: list[dict[str, object]] = [{"name": shown} for shown in names.values()]
    for key, (table, column) in columns.items():
        cells = {row["method"]: row[column] for row in table}
        for row, method in zip(rows, names, strict=True):
            row[key] = None if cells[method] == "-" else number(cells[method])
    notes = {
        "GPT": "GPT: seconds until DDP's loss",
        "convnet": "convolutional network (-: not in 100 steps)",
    }
    bars.draw(rows, path, keys=[*columns], title="4 hosts at 100 Mbit/s", notes=notes)


def fastest(path: Path) -> None:
    """Seconds to DDP's loss over the link's rate; a method may never reach it."""
    rows = measured("Which method reaches DDP's loss first?", "method", "25 Mbit/s")
    names = {
        "DDP": "DDP",
        "DDP, fp16 hook": "DDP, fp16 hook",
        "DDP, PowerSGD hook": "DDP, PowerSGD hook",
        "DDP, Muon": "DDP, Muon",
        "torchft's DiLoCo, every 5": "torchft, DiLoCo every 5",
        "gradwire, Muon, 4 bits (`muon-4bit`)": "gradwire, Muon, 4 bits",
        _MULOCO_EVERY_5: "gradwire, Muon, local steps",
    }
    cells = {row["method"]: list(row.values())[1:6] for row in rows}
    figure = new_figure(4.6)
    axes = figure.subplots()
    _seconds_to_goal(figure, axes, {shown: cells[n] for n, shown in names.items()})
    axes.set_xticks(RATES_BIT, ["25 M", "100 M", "500 M", "2 G", "10 G"])
    label(axes, "rate of each host's link, bit/s", "seconds until DDP's loss")
    save(figure, path, "Local steps with Muon win up to 500 Mbit/s")


GOAL_COLOURS = dict(
    zip(
        (
            "DDP",
            "DDP, fp16 hook",
            "DDP, PowerSGD hook",
            "DDP, Muon",
            "torchft, DiLoCo every 5",
            "gradwire, Muon, 4 bits",
            "gradwire, Muon, local steps",
            "gradwire, 4 bits",
        ),
        SERIES,
        strict=True,
    )
)
"""A method has one colour in all pictures of seconds to DDP's loss."""


def _seconds_to_goal(
    figure: Any,
    axes: Any,
    cells: dict[str, list[str]],
    places: Sequence[float] = RATES_BIT,
    ticks: Sequence[float] = (1, 2, 5, 10, 20),
) -> None:
    """A line for each method over ``places``; "-" is marked as never."""
    lines = []
    for shown, row in cells.items():
        is_reached = "-" not in row
        seconds = map(number, row) if is_reached else [NEVER_S] * len(places)
        style = {"marker": "o"} if is_reached else {"marker": "x", "markersize": 8}
        points = list(zip(places, seconds, strict=True))
        dash = "-" if is_reached else "none"
        colour = (GOAL_COLOURS[shown], dash)
        lines.append(curves.line(axes, points, colour, label=shown, **style))
    has_never = any("-" in row for row in cells.values())
    axes.set_xscale("log")
    axes.set_yscale("log")
    marks = [*ticks, *([NEVER_S] if has_never else ())]
    names = [f"{mark:g}" for mark in ticks] + ["never"] * has_never
    axes.set_yticks(marks, names)
    axes.minorticks_off()
    legend(figure, lines)


def fastest_far(path: Path) -> None:
    """Seconds to DDP's loss over the round trip, at 100 Mbit/s."""
    rows = measured("Over the round trip", "method")
    trips = list(rows[0])[1:6]
    cells = {row["method"]: [row[trip] for trip in trips] for row in rows}
    figure = new_figure(4.6)
    axes = figure.subplots()
    places = [number(trip) for trip in trips]
    _seconds_to_goal(figure, axes, cells, places, (2, 5, 10, 20, 50))
    axes.set_xticks(places, [f"{place:g}" for place in places])
    label(axes, "round trip between hosts, ms", "seconds until DDP's loss")
    save(figure, path, "Between far hosts DDP waits for distance")


def far(path: Path) -> None:
    """Seconds per step over the round trip, for two models, by method."""
    section = "How long is a step between far hosts?"
    panels = {}
    for model in ("4,160 parameters, 1 Gbit/s", "926,160 parameters, 50 Mbit/s"):
        rows = measured(section, model)
        panels[model] = {
            row[model].replace("`", "gradwire ", 1).rstrip("`"): [
                (number(trip), number(cell)) for trip, cell in list(row.items())[1:]
            ]
            for row in rows
        }
    curves.draw_panels(
        panels,
        path,
        title="Four hosts: what distance costs",
        x_label="round trip, ms",
        y_label="seconds per step",
        doubling=True,
    )


def hosts(path: Path) -> None:
    """Time and bytes of an exchange among hosts of two ranks, with and without
    ``mesh``.
    """
    section = "Do hosts of several ranks gain by adding up first?"
    rows = [
        {
            "name": row["exchange"].replace("-on_hosts", ", mesh"),
            "s": number(row["time"]) * (1e-3 if " ms" in row["time"] else 1),
            "MB": number(row["bytes on a host's link"]),
        }
        for row in measured(section, "exchange", "time")
    ]
    notes = {"s": "seconds of one exchange", "MB": "MB on a host's link"}
    title = "4 hosts of 2 ranks at 200 Mbit/s, 10 M elements"
    bars.draw(rows, path, keys=["s", "MB"], title=title, notes=notes)


def plan(path: Path) -> None:
    """The share of a step that waits for the network, over the link's rate, for three
    models.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for model in ("vgg16", "bert_base", "resnet50"):
        profile = gw.catalogue.load(model)
        computed_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
        for rate in (1e9 * 2**at for at in range(-1, 7)):
            cluster = gw.Cluster(num_ranks=8, rate_bytes_per_s=rate / 8)
            made = gw.plan("ddp", profile, cluster)
            step_s = gw.simulate(made, profile, cluster).iteration_s
            found.setdefault(model, []).append(
                (rate / 1e9, 100 * (1 - computed_s / step_s))
            )
    curves.draw_panels(
        {"": found},
        path,
        title="How much of a DDP step waits for the network",
        x_label="rate of each rank's link, Gbit/s (8 ranks, simulated)",
        y_label="% of the step",
        doubling=True,
    )


def frameworks(path: Path) -> None:
    """Which call makes the DDP model, by framework, and from which call on there is a
    handle.
    """
    calls = {
        "plain DDP": ("DDP(model)", "gw.attach(model, ...)", "handle"),
        "Accelerate": ("prepare(...)", "accelerator.prepare(...)", "attachment.handle"),
        "Transformers": ("hook_trainer(...)", "trainer.train()", "attachment.handle"),
        "Lightning": (
            "GradwireStrategy(...)",
            "trainer.fit(model)",
            "attachment.handle",
        ),
        "Fabric": ("GradwireFabric(...)", "fabric.setup(...)", "attachment.handle"),
    }
    figure = new_figure(3.4)
    axes = figure.subplots()
    makes = "makes the DDP model"
    there = "the handle exists"
    colours = {makes: SERIES[1], there: SERIES[2]}
    for row, texts in enumerate(calls.values()):
        made_by = 0 if row == 0 else 1
        for place, text in enumerate(texts):
            colour = {made_by: colours[makes], 2: colours[there]}.get(place, FAINT)
            ink = INK if colour == FAINT else "white"
            axes.barh(row, 0.97, left=place, color=colour, height=0.7)
            axes.text(place + 0.04, row, text, fontsize=7, va="center", color=ink)
    axes.set_yticks(range(len(calls)), [*calls])
    axes.set_xticks([0.48, 1.48, 2.48], ["first call", "second call", "from then on"])
    axes.invert_yaxis()
    label(axes, "")
    axes.grid(visible=False)
    from matplotlib.patches import Patch

    legend(
        figure,
        [Patch(facecolor=colour, label=name) for name, colour in colours.items()],
    )
    save(figure, path, "Who makes the DDP model, and when")


def step(path: Path) -> None:
    """One step of a small model by two plans, on the simulator's clock."""
    profile = gw.catalogue.load("vgg16")
    cluster = gw.Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    traces = {
        f"{name} ({planner})": gw.simulate(
            gw.plan(planner, profile, cluster), profile, cluster
        )
        for planner, name in (("ddp", "DDP's buckets"), ("usbyte", "overlapping plan"))
    }
    timeline.draw(traces, path, title="One step of VGG16, 8 ranks at 10 Gbit/s")


def demo(path: Path) -> None:
    """One step of rank 0 in the demo, by three methods."""
    names = {
        "ddp": "DDP",
        "gradwire-cast16": "cast16 (16 bits)",
        "gradwire-uniform": "uniform (4 bits)",
    }
    folder = Path("demo-report")
    traces = {
        name: Trace.of(_of_chrome(folder / f"{file}.trace.json"))
        for file, name in names.items()
    }
    timeline.draw(traces, path, title="One step of rank 0 at 200 Mbit/s")


def _of_chrome(file: Path) -> Iterator[Span]:
    """Rank 0's spans of a Chrome trace; lanes that the trace numbers are one lane
    again.
    """
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name" and event["pid"] == 0
    }
    kinds = {"gather": "copy", "scatter": "copy", "pack": "copy", "count": "copy"}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 0:
            start_s = event["ts"] / 1e6
            lane = lanes[event["tid"]].split()[0]
            first, *rest = event["name"].split(maxsplit=1)
            name = " ".join([kinds.get(first, first), *rest])
            yield Span(0, lane, name, start_s, start_s + event["dur"] / 1e6)


def own(path: Path) -> None:
    """A block of gradient, what a compressor makes of it, and what is left."""
    sys.path.insert(0, str(ROOT / "examples"))
    from own_compressor import ternary

    torch.manual_seed(0)
    gradient = torch.randn(64)
    compressor = ternary()
    payload, _ = compressor.encode(None, gradient)
    decoded = compressor.decode(payload, torch.empty(64))
    figure = new_figure(4.6)
    above, below = figure.subplots(2, 1, sharey=True)
    places = range(64)
    drawn = [above.bar(places, gradient.tolist(), color=SERIES[0], label="gradient")]
    drawn += above.plot(
        places, decoded.tolist(), "_", color=SERIES[1], label="decoded", ms=5, mew=2.5
    )
    drawn += [
        below.bar(
            places, (gradient - decoded).tolist(), color=SERIES[3], label="residual"
        )
    ]
    label(
        above,
        "",
        "",
        f"64 elements are sent in {payload.size_bytes} bytes in place of 256",
    )
    label(below, "element", "", "the residual is added to the next gradient")
    legend(figure, drawn, columns=3)
    save(figure, path, "One gradient through ternary")


# ---- pictures of ranks that run here -------------------------------------------------


def run(ranks: int, program: Callable[[int, Path], None]) -> list[Any]:
    """Runs a program as so many processes of one group; returns the JSON that each
    wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("spawn")
        address = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29533",
            "WORLD_SIZE": str(ranks),
        }
        os.environ |= address
        every = [
            context.Process(target=_rank, args=(rank, program, Path(folder)))
            for rank in range(ranks)
        ]
        for process in every:
            process.start()
        for process in every:
            process.join()
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(ranks)
        ]


def _rank(rank: int, program: Callable[[int, Path], None], folder: Path) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program(rank, folder / f"{rank}.json")


def local_steps(path: Path) -> None:
    """The way of two ranks' two parameters from anchor to anchor."""
    figure = new_figure(4.6)
    axes = figure.subplots()
    every = run(2, _walk)
    drawn = []
    for rank, found in enumerate(every):
        for start in range(0, len(found["way"]), 7):  # an anchor and six steps from it
            points = found["way"][start : start + 7]
            drawn = [
                *drawn,
                *axes.plot(
                    *zip(*points, strict=True),
                    "o-",
                    color=SERIES[rank],
                    ms=3,
                    label=f"rank {rank}: six local steps",
                ),
            ]
    anchors = every[0]["anchors"]
    line = axes.plot(*zip(*anchors, strict=True), "D--", color=INK, label="anchors")
    legend(figure, [drawn[0], drawn[-1], *line], columns=1)
    label(axes, "first parameter", "second parameter", "each line starts at an anchor")
    save(figure, path, "Local steps of two ranks, three periods")


def _walk(rank: int, file: Path) -> None:
    goal = torch.tensor([[4.0, 0.5], [1.5, 3.5]][rank])
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
    outer = partial(torch.optim.SGD, lr=1.0)
    handle = gw.local_steps(model, optimizer, "none", every=6, outer=outer)

    def place() -> list[float]:
        found: list[float] = model.weight.detach().flatten().tolist()
        return found

    way = []
    anchors = [place()]
    for number_of_step in range(18):
        if number_of_step % 6 == 0:
            way.append(place())
        optimizer.zero_grad()
        (model.weight.flatten() - goal).square().sum().backward()
        before = model.weight.detach().clone()
        gradient = model.weight.grad.clone()
        optimizer.step()
        way.append((before - 0.06 * gradient).flatten().tolist())
        if number_of_step % 6 == 5:
            anchors.append(place())
    handle.detach()
    file.write_text(json.dumps({"way": way, "anchors": anchors}), encoding="utf-8")


def fsdp(path: Path) -> None:
    """Which elements of each parameter every rank holds under HSDP."""
    every = run(4, _shards)
    figure = new_figure(3.4)
    axes = figure.subplots()
    for rank, shards in enumerate(every):
        left = 0
        for _, numel, start, end in shards:
            axes.barh(
                rank, numel, left=left, color=FAINT, height=0.6, edgecolor="white"
            )
            axes.barh(
                rank, end - start, left=left + start, color=SERIES[rank % 2], height=0.6
            )
            left += numel
    for shard in range(2):
        arrow = {"arrowstyle": "<->", "color": INK}
        at = 0.25 * every[0][0][1] * (1 + 2 * shard)
        axes.annotate("", (at, shard + 2), (at, shard), arrowprops=arrow)
    axes.set_yticks(range(4), [f"host {rank // 2}, rank {rank}" for rank in range(4)])
    axes.invert_yaxis()
    label(axes, "elements of the model (grey: not on this rank)")
    axes.grid(visible=False)
    axes.set_title(
        "arrows: gradwire averages equal shards", loc="left", fontsize=9, color=INK
    )
    save(figure, path, "HSDP on 2 hosts of 2 ranks")


def _shards(rank: int, file: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 8, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    handle = gw.attach(model, gw.compress.uniform(), group=mesh["replicate"])
    found = []
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        row = parameter.numel() // parameter.shape[0]
        start = dist.get_rank(mesh["shard"].get_group()) * local.shape[0] * row
        found.append((name, parameter.numel(), start, start + local.numel()))
    handle.detach()
    file.write_text(json.dumps(found), encoding="utf-8")


def failures(path: Path) -> None:
    """The steps of four ranks, one of which dies."""
    every = run(4, _until_a_rank_dies)
    zero_s = min(start for found in every for start, _, _ in found)
    figure = new_figure(2.9)
    axes = figure.subplots()
    colours = {"step": SERIES[2], "interrupted step": SERIES[3]}
    for rank, found in enumerate(every):
        for start, end, what in found:
            span = (start - zero_s, end - start)
            axes.broken_barh(
                [span],
                (rank - 0.35, 0.7),
                facecolors=colours[what],
                edgecolors="white",
                lw=0.5,
            )
    died_s = every[2][-1][1] - zero_s
    axes.plot([died_s], [2], "x", color=INK, ms=10, mew=2)
    axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
    axes.invert_yaxis()
    label(axes, "seconds", title='rank 2 is killed (x); on_failure="shrink"')
    from matplotlib.patches import Patch

    legend(figure, [Patch(facecolor=c, label=name) for name, c in colours.items()])
    save(figure, path, "Three ranks continue")


def _until_a_rank_dies(rank: int, file: Path) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(64, 8)
    policy = gw.FailurePolicy(on_failure="shrink", timeout=timedelta(seconds=60))
    handle = gw.attach(model, gw.compress.uniform(), failure=policy)
    found: list[tuple[float, float, str]] = []
    for number_of_step in range(12):
        what = ""
        while what != "step":
            start = time.time()
            try:
                model.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                time.sleep(0.5)  # a larger model
                what = "step"
            except gw.RanksLost:
                what = "interrupted step"
            found.append((start, time.time(), what))
        if rank == 2 and number_of_step == 4:
            file.write_text(json.dumps(found), encoding="utf-8")
            os._exit(1)
    file.write_text(json.dumps(found), encoding="utf-8")
    handle.detach()


PICTURES: dict[str, Callable[[Path], None]] = {
    "timeline": demo,
    "choosing": choosing,
    "fastest": fastest,
    "fastest_far": fastest_far,
    "frameworks": frameworks,
    "far": far,
    "hosts": hosts,
    "plan": plan,
    "step": step,
    "own": own,
    "local_steps": local_steps,
    "fsdp": fsdp,
    "failures": failures,
}

if __name__ == "__main__":
    for asked in sys.argv[1:] or PICTURES:
        draw(asked, FOLDER / f"{asked}.png")
