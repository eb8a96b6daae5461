"""The next forward pass, overlapped: gates before modules, and gradients that are still
on the way.

``attach`` loads the room where a plan overlaps the forward pass and an optimizer is
given. It knows the step and the optimizer, and not which plan it serves.
"""
