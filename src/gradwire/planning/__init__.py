"""Planning: what is measured, what is planned from it, and what the plan would give.

``data/`` has Profile, Cluster and Plan with their JSON forms, ``measure/`` makes them,
``planner/`` has one planner a file, ``simulation/`` predicts a plan's timeline.
``plan`` calls a planner by name, ``explain`` says what a plan gives and why. The files
beside them are what planners share.
"""
