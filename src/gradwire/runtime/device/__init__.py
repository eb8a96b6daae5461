"""Devices: streams and events, pinned copies for gloo, a device's own groups.

The step calls it for tensors that are not in host memory. It knows torch's devices, and
nothing of exchanges or plans.
"""
