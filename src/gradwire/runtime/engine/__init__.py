"""The engine: one rank's verbs become tasks, and lost ranks end its waits.

``engine`` drives the generators of exchanges. ``backends`` chooses gloo or NCCL for
each message, and ``plain`` sends plain Python values beside gradients.
"""
