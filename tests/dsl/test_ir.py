"""The table of legal nodes, the verifier, the rewrites and the schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.registry import examples
from gradwire.dsl import interp, rewrite
from gradwire.dsl.gpu.render import counting
from gradwire.dsl.interp import Draws
from gradwire.dsl.ir import (
    FLOAT32,
    INT32,
    Buffer,
    DType,
    Extent,
    IllTyped,
    Kernel,
    Node,
    Op,
    const,
    load_buffer,
    node,
    store,
    walk,
)
from gradwire.dsl.program import Program
from gradwire.dsl.rewrite import simplified
from gradwire.dsl.schedule import passes
from tests.dsl.verifier import verify
from tests.each import each
from tests.strategies import bounded

IN = Buffer("in", FLOAT32, Extent.ELEMENT)
OUT = Buffer("out", FLOAT32, Extent.ELEMENT)
HEADER = Buffer("header", FLOAT32, Extent.BLOCK)
X = load_buffer(IN)
PLACE = node(Op.PLACE)
PLACES = Buffer("places", INT32, Extent.KEPT)
KEPT = Buffer("kept", FLOAT32, Extent.KEPT)
POSITIVE = node(Op.LESS, const(0.0, FLOAT32), X)
NEGATIVE = node(Op.LESS, X, const(0.0, FLOAT32))


@each(
    "make, text",
    [
        (lambda: node(Op.ADD, X), "add takes"),
        (lambda: node(Op.ADD, X, const(1, INT32)), "two operands of one type"),
        (lambda: node(Op.SHL, X, const(1, INT32)), r"shl takes \(int32, int32\)"),
        (lambda: node(Op.WHERE, X, X, X), "where takes"),
        (lambda: node(Op.CAST, X), "state its type"),
        (
            lambda: store(Buffer("q", DType.UINT2, Extent.ELEMENT), X),
            "what its buffer holds",
        ),
    ],
)
def test_wrongly_typed_operations_are_refused(make, text):
    with pytest.raises(IllTyped, match=text):
        make()


def kernel(*stores: Node) -> Kernel:
    return verified(Kernel("k", 64, (IN, OUT, HEADER), stores))


def verified(made: Kernel) -> Kernel:
    verify(made)
    return made


PROGRAMS = [one for one in examples("compress") if isinstance(one, Program)]


@each("codec", PROGRAMS)
def test_kernels_of_every_program_pass_the_verifier(codec):
    made = codec.kernels()
    for one in made.built.kernels:
        verify(one)
        counted = counting(one)
        if counted is not None:
            verify(counted)


def test_the_verifier_names_the_first_bad_node():
    # past the table
    bad = Node(Op.FLOOR, INT32, Extent.ELEMENT, (const(1, INT32),), None)
    with pytest.raises(
        IllTyped, match=r"k: node 1, floor\(int32\).*floor takes \(float32\)"
    ):
        kernel(Node(Op.STORE, FLOAT32, Extent.ELEMENT, (bad,), OUT))
    with pytest.raises(IllTyped, match=r"node 0, load.*none of the kernel's"):
        kernel(store(OUT, load_buffer(Buffer("other", FLOAT32, Extent.ELEMENT))))
    with pytest.raises(IllTyped, match="does not fit one a block"):
        kernel(store(HEADER, X))
    with pytest.raises(IllTyped, match="outside"):
        kernel(store(OUT, node(Op.ARG, dtype=FLOAT32, arg=0)))
    with pytest.raises(IllTyped, match="roots"):
        kernel(X)


@each(
    "stores, text",
    [
        ((store(KEPT, X),), "a condition stands with kept elements"),
        ((store(OUT, X, POSITIVE),), "a condition stands with kept elements"),
        (
            (store(KEPT, X, POSITIVE), store(PLACES, node(Op.PLACE), NEGATIVE)),
            "one condition",
        ),
        (
            (store(KEPT, load_buffer(KEPT), POSITIVE),),
            "elements of the kernel that reads them",
        ),
        (
            (store(OUT, node(Op.LOAD_AT, PLACE, dtype=FLOAT32, arg=IN)),),
            "read in order",
        ),
    ],
)
def test_kept_elements_and_places_have_rules(stores, text):
    with pytest.raises(IllTyped, match=text):
        verified(Kernel("k", 64, (IN, OUT, KEPT, PLACES), stores))


# ---- schedule ------------------------------------------------------------------------


@each("codec", PROGRAMS)
def test_every_store_is_done_once_and_no_pass_reads_what_is_overwritten(codec):
    made = codec.kernels().encode_with_residual
    order = passes(made)
    done = [s for one in order for s in (*one.before, *one.stores) if s.op is Op.STORE]
    assert sorted(s.arg.name for s in done) == sorted(s.arg.name for s in made.stores)
    residual = load_buffer(rewrite.RESIDUAL)
    last_read = max(i for i, one in enumerate(order) if residual in one.elements)
    written = next(
        i for i, one in enumerate(order) if residual.arg in {s.arg for s in one.stores}
    )
    assert written == last_read


# ---- rewrites ------------------------------------------------------------------------

_LEAVES = st.one_of(
    st.just(X),
    st.just(node(Op.RANDOM, arg=0)),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.0, float("inf"), float("nan")]).map(
        lambda value: const(value, FLOAT32)
    ),
)


def _grown(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    two = st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.SMALLER, Op.GREATER])
    one = st.sampled_from([Op.NEG, Op.ABS, Op.FLOOR, Op.ROUND, Op.SQRT, Op.CANONICAL])
    condition = st.builds(
        lambda op, a, b, flips: _flipped(node(op, a, b), flips),
        st.sampled_from([Op.LESS, Op.AT_MOST, Op.EQUAL]),
        inner,
        inner,
        st.integers(0, 2),
    )
    narrow = st.sampled_from([DType.UINT1, DType.UINT4, DType.UINT8, INT32])
    return st.one_of(
        st.builds(node, two, inner, inner),
        st.builds(node, one, inner),
        st.builds(lambda c, a, b: node(Op.WHERE, c, a, b), condition, inner, inner),
        st.builds(
            lambda a, dtype, between: _back(node(Op.CAST, a, dtype=dtype), between),
            inner,
            narrow,
            narrow,
        ),
    )


def _flipped(found: Node, times: int) -> Node:
    return _flipped(node(Op.NOT, found), times - 1) if times else found


def _back(narrow: Node, between: DType) -> Node:
    """Through another type and back: itself again, unless that type is the narrower
    one.
    """
    again = node(Op.CAST, node(Op.CAST, narrow, dtype=between), dtype=narrow.dtype)
    return node(Op.CAST, again, dtype=FLOAT32)


def evaluated(value: Node, in_N: torch.Tensor) -> torch.Tensor:
    out_N = torch.empty_like(in_N)
    operands = {"in": in_N, "out": out_N, "header": torch.zeros(1)}
    made = kernel(store(OUT, node(Op.CANONICAL, value)))
    interp.run(made, operands, in_N.numel(), Draws(7, 3))
    return out_N.view(torch.int32)


@bounded(150)
@given(st.recursive(_LEAVES, _grown, max_leaves=12))
def test_simplification_keeps_the_bits(value):
    in_N = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-40, 3e38, float("inf"), float("nan")])
    (simpler,) = simplified((value,))
    assert len(list(walk([simpler]))) <= len(list(walk([value])))
    assert torch.equal(evaluated(simpler, in_N), evaluated(value, in_N))
