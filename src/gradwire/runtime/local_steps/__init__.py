"""Local steps: ranks train alone, and exchange the progress of many steps.

``gw.local_steps`` is its entry. It knows the step and state; the step knows nothing of
it.

A pseudo-gradient is an anchor less its parameter, and travels as a gradient does: by
the same messages, engine, states and checkpoints. One fragment is on its way at a time,
and its delay ends before the next launch. Losses of an exchange stay in a residual.
What a rank learnt since the launch stays in its parameters, but for what ``mixing``
drops of it. Other ranks that load a checkpoint go on from the mean of the old ones'
parameters: the mean pseudo-gradient is as it was.

Anchors restart at weights that a loop loads (``loads.py``). Beside each exchange ranks
announce where their loops are, and refuse alike steps that do not match
(``moment.py``).
"""
