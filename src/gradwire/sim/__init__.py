"""Prediction: a virtual clock that carries a plan out over a profile and a cluster.

May import: errors, units, spec, payload, contract, trace, load, collective, compress, cost,
exchange, planner/_types, planner/_check.
"""
