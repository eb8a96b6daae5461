"""Prediction: a virtual clock that carries a plan out over a profile and a cluster.

``clock`` has closed forms for a rank that stands for all. ``events`` plays every rank,
on links that all transfers share (``network``). Both price the very steps that training
runs (``supersteps``).
"""
