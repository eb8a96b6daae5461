"""One step: from a gradient's hook to its mean.

``hooks`` collects gradients, ``messages`` groups them, ``synchroniser`` issues messages in one
order on all ranks, and ``engine``, ``lanes`` and ``wire`` carry their verbs out. ``attach`` and the
rooms beside this one call it. It knows nothing of DDP, of plans that change, or of lost ranks.
"""
