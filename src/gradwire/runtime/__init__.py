"""One rank for real: ``attach`` hooks a model, and its gradients are exchanged in each step.

``step/`` is what every attach runs, with parts of ``failure/``, ``device/`` and ``grid/``. Plans
and the other rooms are loaded where they are asked for: ``ddp/``, ``overlap/``, ``state/``,
``elastic/``, ``local_steps/``, ``fsdp/`` and ``pilot/``. So some imports stand in functions, where
not every step comes to them.

``setup/`` holds what an attach is given, refuses and compares among ranks. Beside the rooms lie
``attach``, its ``handle``, and ``controls``, which connects a step to a plan that changes.
"""
