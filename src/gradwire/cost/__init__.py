"""Costs of things: profiles of models, links between ranks, fits of measurements.

Data and pure functions only. May import: errors, units, spec, payload, contract, trace, collective.
"""
