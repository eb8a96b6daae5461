"""Prediction: a virtual clock that carries a plan out over a profile and a cluster.

Closed forms for a rank that stands for all (``clock``), or every rank by events
(``events``) on links that all transfers share (``network``), from the very steps that
training runs (``supersteps``).
"""
