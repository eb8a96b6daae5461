"""Ranks that come and ranks without data: a newcomer joins a run, an uneven rank joins each step.

``FailurePolicy(rejoin=)`` and torch's ``Join`` call it. It knows the step, state and survivors.
"""
