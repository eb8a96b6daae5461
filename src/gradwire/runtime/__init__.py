"""One rank for real: ``attach`` hooks a model and exchanges its gradients.

Every attach runs ``step/``, and below it ``engine/``, ``liveness/``, ``agreement/``,
``transport/``, ``device/`` and parts of ``grid/``. Plans and the other rooms are loaded
where they are asked for: ``ddp/``, ``overlap/``, ``state/``, ``survive/``,
``local_steps/`` and ``fsdp/``. So some imports stand in functions, where not every step
comes to them.

Beside the rooms lie ``attach`` with its ``settings``, their ``pairs``, the messages
that it makes without a plan (``fused``) and with one (``planned``), its ``handle``, and
``controls``, which connects a step to a plan that changes.
"""
