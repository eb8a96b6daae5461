"""Lost ranks and damaged replicas: noticed, named, and survived.

``pulse``, ``roll_call`` and ``blame`` notice and name; ``commit``, ``survivors`` and ``shrink`` go
on without a lost rank; ``integrity`` and ``guard`` compare replicas. The step calls it through
hooks of its own. It knows ranks and steps, and nothing of what a gradient means.
"""
