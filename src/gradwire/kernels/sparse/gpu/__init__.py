"""The partition on a GPU, in Triton: two passes.

``partition`` calls it for tensors on a GPU. It imports triton where a kernel is launched, and
knows no format and no rank.
"""
