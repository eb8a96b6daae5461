"""Planning: what planners share, and what is asked of them.

``plan`` calls one by name, ``tune`` searches its settings, ``explain`` says what a plan gives and
why. ``settings`` binds a planner's settings. ``buckets``, ``orders``, ``phases``, ``space`` and
``sparse`` are what planners are made of; ``price`` is the seconds that the simulator finds.
``periods`` prices local steps, which no planner chooses.
"""
