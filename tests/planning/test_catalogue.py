"""The catalogue's files: totals as published, sane times and order, and what makes
them.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import InvalidSetting, UnknownName
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE
from gradwire.planning.data.profile import Profile
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planning.inputs import load_or_read
from scripts.catalogue.entries import FAMILIES, MODELS
from scripts.make_catalogue import FOLDER, render
from tests.each import each

TORCHVISION = "torchvision's documentation of the model's weights, num_params"
HIPRESS = "HiPress, table 6 (given there in MB of 2**20 bytes)"

PUBLISHED = {
    "vgg16": (138_357_544, TORCHVISION),
    "vgg19": (143_667_240, TORCHVISION + "; " + HIPRESS + ": 548.05 MB"),
    "resnet50": (25_557_032, TORCHVISION),
    "resnet152": (60_192_808, TORCHVISION),
    "mobilenet_v2": (3_504_872, TORCHVISION),
    "googlenet": (
        6_624_904,
        TORCHVISION + ", which leaves the auxiliary classifiers out",
    ),
    "inception_v3": (
        27_161_264 - 3_326_696,
        TORCHVISION + ", less the auxiliary classifier",
    ),
    "bert_base": (
        109_482_240 + 2 * 768 + 2,
        "bert-base-uncased, and a classifier of two labels",
    ),
    "bert_large": (336_226_108, HIPRESS + ": 1282.60 MB"),
    "gpt2": (124_439_808, "gpt2 as released (124M), output embedding tied"),
    "gpt2_large": (774_030_080, "gpt2-large as released (774M), output embedding tied"),
    "gpt2_xl": (1_557_611_200, "gpt2-xl as released (1558M), output embedding tied"),
    "bloom_3b": (3_002_557_440, "model card of bigscience/bloom-3b"),
    "vit_large": (304_326_632, TORCHVISION + ", vit_l_16"),
    "lstm": (85_974_278, HIPRESS + ": 327.97 MB"),
    "transformer": (61_362_176, HIPRESS + ": 234.08 MB"),
    "ugatit": (670_761_088, HIPRESS + ": 2558.75 MB"),
    "ugatit_light": (134_021_248, HIPRESS + ": 511.25 MB"),
}


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="its definition comes from the package transformers",
)


def num_parameters(profile: Profile) -> int:
    return sum(tensor.numel for layer in profile.layers for tensor in layer.tensors)


def test_every_model_of_the_script_has_a_file_and_no_other() -> None:
    assert set(catalogue.names()) == set(MODELS) == set(PUBLISHED)


@each("name", catalogue.names())
def test_totals_are_the_published_ones_and_times_say_where_they_come_from(
    name: str,
) -> None:
    profile = catalogue.load(name)
    published, source = PUBLISHED[name]
    assert profile.model == name
    assert num_parameters(profile) == published, source
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    assert profile.backward_s == pytest.approx(2 * profile.forward_s, rel=1e-3)
    assert "not a measurement" in profile.source
    assert f"Batch {profile.batch_size} " in profile.source
    assert all(layer.tensors for layer in profile.layers)


@each("family", [f for f in FAMILIES if FAMILIES[f].model in catalogue.names()])
def test_iterations_take_the_published_time(family: str) -> None:
    published = FAMILIES[family]
    profile = catalogue.load(published.model)
    iteration_s = profile.forward_s + profile.backward_s
    if profile.batch_size == published.batch_size:
        assert iteration_s == pytest.approx(published.iteration_s, rel=1e-3)
    else:
        # Only VGG16: weights are read once a batch, so a larger one is a little faster
        # a sample.
        share = published.batch_size / profile.batch_size
        assert 0.8 < iteration_s * share / published.iteration_s < 1


@each("name", ["mobilenet_v2", "ugatit_light"])
def test_the_script_gives_the_same_file_again(name: str) -> None:
    assert render(name) == (FOLDER / f"{name}.json").read_text(encoding="utf-8")


@needs_transformers
@pytest.mark.filterwarnings("default")
@each(
    "name", ["bert_base", "lstm", "transformer", "gpt2_large", "bloom_3b", "vit_large"]
)
def test_the_script_gives_the_same_layers_again(name: str) -> None:
    """Times may move a little: versions of transformers spell elementwise work
    differently.
    """
    again, profile = Profile.parse(render(name)), catalogue.load(name)
    assert [(x.name, x.tensors) for x in again.layers] == [
        (x.name, x.tensors) for x in profile.layers
    ]
    assert [x.forward_s for x in again.layers] == pytest.approx(
        [x.forward_s for x in profile.layers], rel=0.1
    )


def test_a_file_does_not_hide_a_model_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = catalogue.load("vgg16").model_copy(update={"model": "mine"})
    for name in ("vgg16", "own"):
        own.save(tmp_path / name)
    (tmp_path / "resnet50").mkdir()
    models = [load_or_read(name).model for name in ("vgg16", "own", "resnet50")]
    assert models == ["vgg16", "mine", "resnet50"]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        UnknownName, match=r"'bert-base'.*gpt2.*vgg19.*did you mean 'bert_base'"
    ):
        catalogue.load("bert-base")
    with pytest.raises(InvalidSetting):
        catalogue.load("../cost/profile")


LINE = LineFit(alpha_s=1e-4, per_unit_s=1e-9)
LATENT = Cluster(
    num_ranks=4,
    rate_bytes_per_s=1e12,
    hop_s=0.1,
    codecs={"dgc": CodecFit(encode=LINE, decode=LINE, merge=LINE)},
)


PLANNERS: list[partial[Any]] = [
    partial(gw.plan, "auto", fidelity="any"),
    *(partial(gw.plan, name) for name in ("ssfusion", "omgs", "cupcake")),
    partial(gw.plan, "espresso"),
]


@each("make", PLANNERS)
@each("numels", [(2**30, 2**30, 2**30 + 5, 2**20), (2**20, 2**31, 2**20)])
def test_no_message_is_longer_than_an_int32_can_tell(
    make: partial[Any], numels: tuple[int, ...]
) -> None:
    """Not even where latency would fuse all: a tensor of more elements travels
    dense.
    """
    rows = [([numel], 1e-4, 1e-4) for numel in numels]
    profile = profile_of(*rows)
    plan = make(profile, LATENT)
    gw.simulate(plan, profile, LATENT)
    for message in plan.messages:
        assert message.exchange == DENSE or sum(c.numel for c in message.chunks) < 2**31
