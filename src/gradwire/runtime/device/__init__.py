"""Devices: streams and events, pinned copies for gloo, groups of a device's own back
end.

The step calls it for tensors that are not in host memory. It knows torch's devices, and
nothing of exchanges or plans.
"""
