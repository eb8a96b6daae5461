"""Writes ``planning/catalogue/*.json``: layer tables of models nobody has to have at
hand.

    python -m scripts.make_catalogue [--out FOLDER] [NAME ...]

BERT, GPT-2, BLOOM and ViT need the package transformers; nothing else does. No weights
are loaded and no computing is done: models live on the meta device. Runs in the root of
the repository.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path

import torch

from gradwire.errors import NotInstalled
from scripts.catalogue import roofline
from scripts.catalogue.entries import CHECKS, FAMILIES, MODELS
from scripts.catalogue.roofline import LayerWork

FOLDER = (
    Path(__file__).resolve().parents[1] / "src" / "gradwire" / "planning" / "catalogue"
)


@cache
def work(name: str, batch_size: int) -> list[LayerWork]:
    """Layers of a model with what they cost at efficiency 1."""
    entry = MODELS[name]
    with torch.device("meta"):
        model = entry.build()
    return roofline.layers_of(model, entry.sample(batch_size))


def efficiency(family: str) -> float:
    """The share of the roofline that gives the family's published time."""
    given = FAMILIES[family]
    return (
        roofline.ideal_iteration_s(work(given.model, given.batch_size))
        / given.iteration_s
    )


def source(name: str) -> str:
    """The stated throughput model, in words, for one profile."""
    entry = MODELS[name]
    given = FAMILIES[entry.family]
    what = "image" if len(entry.inputs) == 3 else "tokens"
    return (
        f"A throughput model, not a measurement: {roofline.DEVICE}; per operation "
        f"max(FLOPs / {roofline.FLOP_RATE / 1e12:g} TFLOP/s, bytes / "
        f"{roofline.BYTE_RATE / 1e9:g} GB/s) / {efficiency(entry.family):.4f}; 3x3 "
        f"convolutions of stride 1 count 1/{roofline.WINOGRAD:g} of their FLOPs "
        f"(Winograd); backward = {roofline.BACKWARD:g} x forward; no kernel launches, "
        f"no optimizer. The efficiency makes {given.model} take "
        f"{given.iteration_s:.4g} s an iteration at batch {given.batch_size} "
        f"({given.source}). Batch {entry.batch_size} of {what} "
        f"{'x'.join(map(str, entry.inputs))}: {entry.batch_source}. Made by "
        "scripts/make_catalogue.py."
    )


def _seconds(value: float) -> float:
    """Four digits: what the model is worth, and no noise of the last place in the
    files.
    """
    return float(f"{value:.4g}")


def render(name: str) -> str:
    """The text of a profile, one line a layer."""
    entry = MODELS[name]
    share = efficiency(entry.family)
    lines = []
    for layer in work(name, entry.batch_size):
        forward_s = _seconds(layer.ideal_s / share)
        row = {
            "name": layer.name.removeprefix("model."),
            "tensors": [
                {
                    "name": tensor.removeprefix("model."),
                    "shape": list(shape),
                    "dtype": "float32",
                }
                for tensor, shape in layer.tensors
            ],
            "forward_s": forward_s,
            "backward_s": _seconds(roofline.BACKWARD * forward_s),
        }
        lines.append(json.dumps(row, separators=(",", ":")))
    head = {"schema_version": 1, "model": name, "source": source(name)}
    opening = json.dumps(head | {"batch_size": entry.batch_size}, indent=0)[:-2]
    return opening + ',\n"layers": [\n' + ",\n".join(lines) + "\n]}\n"


def _report(name: str) -> str:
    entry = MODELS[name]
    layers = work(name, entry.batch_size)
    forward_s = sum(layer.ideal_s for layer in layers) / efficiency(entry.family)
    shapes = [torch.Size(shape) for layer in layers for _, shape in layer.tensors]
    line = (
        f"{name:13} {sum(shape.numel() for shape in shapes):12,} parameters "
        f"{len(layers):4} layers {len(shapes):4} tensors, batch {entry.batch_size:3}: "
        f"forward {forward_s * 1e3:6.1f} ms, backward "
        f"{forward_s * roofline.BACKWARD * 1e3:6.1f} ms, efficiency "
        f"{efficiency(entry.family):.3f}"
    )
    if name in CHECKS:
        check = CHECKS[name]
        ideal_s = roofline.ideal_iteration_s(work(name, check.batch_size))
        model_ms = ideal_s / efficiency(entry.family) * 1e3
        line += f"; batch {check.batch_size}: {model_ms:.1f} ms, "
        line += f"published {check.iteration_s * 1e3:.1f} ms"
    return line


def main() -> None:
    """Writes the named profiles, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: %(default)s")
    options = parser.parse_args()
    for name in options.names or MODELS:
        if name not in MODELS:
            parser.error(f"no model is called {name!r}; there are: {', '.join(MODELS)}")
        try:
            (options.out / f"{name}.json").write_text(render(name), encoding="utf-8")
        except NotInstalled as error:
            parser.error(str(error))
        print(_report(name))


if __name__ == "__main__":
    main()
