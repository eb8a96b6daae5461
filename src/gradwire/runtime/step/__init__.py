"""One step: from a gradient's hook to its mean.

``hooks`` collects gradients. ``synchroniser`` launches messages in one order on all ranks, waits
for them and writes back. ``messages`` gathers, exchanges and scatters. ``engine`` turns verbs into
tasks of the ``task_graph``, which ``wire`` carries out; it also tells figures beside gradients.
``attach`` and the rooms beside this one call it. It knows nothing of DDP, of plans that change, or
of lost ranks.
"""
