"""``gradwire bench auto``: the plan that ``auto`` chooses beside DDP and single
choices.
"""
