"""Data with a JSON form: what was measured of models and clusters, and plans.

``profile``, ``sparsity`` and ``cluster`` are what planners are given, ``plan`` is what they return.
``check`` says whether a plan is sound, ``exchanges`` makes the exchanges that it names.
"""
