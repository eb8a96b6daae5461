"""An attach before its first step: what it is given, what it refuses, what ranks agree on.

``settings`` has a user's choices, and checks them. ``pairs`` is the table of features that
do not go together. ``refusals`` looks at the model, at attach and later. ``fingerprint`` is what
ranks compare.
"""
