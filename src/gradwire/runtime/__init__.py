"""One rank for real: ``attach`` hooks a model, and its gradients are exchanged in each step.

``step/`` is what every attach runs. The other rooms are loaded where they are asked for: ``ddp/``,
``overlap/``, ``state/``, ``failure/``, ``elastic/``, ``local_steps/``, ``device/``, ``grid/``,
``fsdp/`` and ``pilot/``. Beside them lie ``attach`` and ``handle``, what an attach checks
(``settings``, ``refusals``, ``cautions``, ``strangers``, ``fingerprint``), and what connects a step
to a plan that changes (``backward``, ``controls``).
"""
