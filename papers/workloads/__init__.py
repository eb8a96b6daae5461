"""Models, data and tasks that only the papers' experiments train on.

``resnet18``, ``ncf`` and ``deepfm`` hold models; ``movielens`` reads data that a
machine has or its user puts there; ``applications`` puts both together to tasks, and
``clocked`` tells what a step spends its time on. What the benchmarks train on as well
is in ``gradwire_bench.workloads``.
"""
