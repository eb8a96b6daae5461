"""The verifier: what a kernel of the language must be, whatever rewrites made it."""

from __future__ import annotations

from gradwire.dsl.ir import Extent, IllTyped, Kernel, Node, Op, refusal_of, walk


def verify(kernel: Kernel) -> None:
    """Raises IllTyped for the first bad node: forbidden by the table, or misplaced."""
    for number, node in enumerate(walk(kernel.stores)):
        refusal = refusal_of(node.op, node.sources, node.dtype, node.arg)
        refusal = refusal or _misplaced(kernel, node)
        if refusal:
            raise IllTyped(f"{kernel.name}: node {number}, {node!r}: {refusal}")


def _misplaced(kernel: Kernel, node: Node) -> str | None:
    if node.op in (Op.LOAD, Op.LOAD_AT, Op.STORE) and node.arg not in kernel.buffers:
        return "its buffer is none of the kernel's"
    if node.op is Op.LOAD_AT and node.arg.extent is not Extent.CALL:
        return f"a buffer {node.arg.extent} is read in order, not at a place"
    if node.extent is Extent.KEPT and node.op is not Op.STORE:
        return "kept elements are the elements of the kernel that reads them"
    if node.op is Op.STORE and node.sources[0].extent > node.arg.extent:
        return f"a value {node.sources[0].extent} does not fit one {node.arg.extent}"
    if node.op is Op.STORE and (node.arg.extent is Extent.KEPT) != (
        len(node.sources) == 2
    ):
        return "a condition stands with kept elements, and with nothing else"
    if (
        node.op is Op.STORE
        and len(node.sources) == 2
        and node.sources[1] is not kernel.keep
    ):
        return "a kernel keeps elements by one condition"
    if node.op is Op.ARG:
        return "an operand of a fold stands outside it"
    if (node.op is Op.STORE) != (node in kernel.stores):
        return "stores are the roots of a kernel, and nothing else is"
    return None
