"""State by parameter name: saved, loaded, gathered, cut, moved to other messages.

The handle and whatever makes new messages call it: a plan that changes, survivors, a
newcomer. It knows messages and their fields, and nothing of how gradients travel.
"""
