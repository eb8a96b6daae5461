"""Ranks that come: a newcomer joins a run between two steps.

``FailurePolicy(rejoin=)`` calls it. It knows the step, state and survivors.
"""
