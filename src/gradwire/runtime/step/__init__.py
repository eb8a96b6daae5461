"""One step: from a gradient's hook to its mean.

``hooks`` collects gradients. ``synchroniser`` launches messages in one order on all
ranks, waits for them and writes back. ``messages`` gathers, exchanges and scatters.
``backup`` and ``scaling`` undo what an optimizer did not take. ``integrity``, ``guard``
and ``local_gradients`` compare replicas, and ``retry`` repeats a pass that every rank
has given up. It knows nothing of DDP, of plans that change, or of survivors.
"""
