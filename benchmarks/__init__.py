"""Benchmarks that only gradwire's developers run; ``gradwire bench`` finds them in a checkout.

``batch`` is ``gradwire bench batch``, ``partition`` is ``gradwire bench partition``, ``idle`` is
``gradwire bench schedule --idle``, and ``kernel_peers`` is what torch does beside the compressors
in ``gradwire bench kernel``. ``demo_peer`` is DeMo's own program beside ``demo``. Everything of
gradwire may be imported here; nothing of it imports this.
"""
