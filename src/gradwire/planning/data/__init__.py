"""Data with a JSON form: what was measured of models and clusters, and plans.

``profile``, ``sparsity`` and ``cluster`` are what planners are given, ``plan`` is what
they return. Planners, the simulator, the runtime and commands read them. They know
nothing of who reads them.
"""
