"""Programs are compressors: each keeps every law of the contract, and pairs like any other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.exchange import ErrorFeedback, Pair, exchange_for
from gradwire.spec import TensorSpec
from tests.laws import exchange_laws
from tests.laws.cases import ALWAYS
from tests.laws.compressor_laws import LAWS
from tests.strategies import bounded, gradients, make_gradient, panel

from .programs import EXAMPLES, qsgd, terngrad, uniform


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_laws(codec: Compressor) -> None:
    @bounded(6)
    @given(grad_N=gradients())
    def holds(grad_N: Tensor) -> None:
        hold(grad_N)

    def hold(grad_N: Tensor) -> None:
        for law in LAWS:
            law(codec, grad_N)

    for grad_N in panel()[::3]:
        hold(grad_N)
    holds()


@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_laws_of_their_exchange(codec: Compressor) -> None:
    made = exchange_for(codec)
    inner = made.inner if isinstance(made, ErrorFeedback) else made
    assert isinstance(inner, Pair)
    for law in exchange_laws.LAWS:
        law(inner, ALWAYS)


@pytest.mark.parametrize("codec", [codec for codec in EXAMPLES if codec.traits.unbiased], ids=repr)
def test_what_is_declared_unbiased_is(codec: Compressor) -> None:
    """The mean over many steps comes near, as near as its spread over them makes likely."""
    grad_N = make_gradient("normal", 256, torch.float32, seed=2)
    state, num_steps = codec.init(TensorSpec("gradient", 256)), 400
    decoded = torch.empty(num_steps, 256)
    for step in range(num_steps):
        payload, state = codec.encode(state, grad_N)
        codec.decode(payload, decoded[step])
    # The largest of 256 standard normals exceeds 5 once in ten thousand tries. One draw of many
    # that went the other way is the least spread an element can have been seen to have.
    gap = float((decoded.amax(0) - decoded.amin(0)).max())
    assert gap > 0, "nothing was drawn"
    spread_N = decoded.std(0).clamp(min=gap / num_steps**0.5)
    off_N = (decoded.mean(0) - grad_N).abs()
    assert bool((off_N <= 5 * spread_N / num_steps**0.5).all())


@pytest.mark.parametrize("kind", [uniform, terngrad, qsgd])
def test_numbers_follow_seed_tensor_and_step(kind: type) -> None:
    grad_N = make_gradient("normal", 500, torch.float32)

    def bytes_of(seed: int, name: str, num_steps: int) -> list[int]:
        codec = kind(seed=seed)
        state = codec.init(TensorSpec(name, 500))
        for _ in range(num_steps):
            payload, state = codec.encode(state, grad_N)
        return list(payload.buffer.tolist())

    first = bytes_of(0, "a", 1)
    assert first == bytes_of(0, "a", 1)
    assert all(first != other for other in (bytes_of(1, "a", 1), bytes_of(0, "b", 1)))
    assert first != bytes_of(0, "a", 2)
