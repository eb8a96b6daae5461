"""Local steps: ranks train by themselves and exchange what they have learnt in many steps.

``gw.local_steps`` is its entry. It knows the step and state; the step knows nothing of it.
"""
