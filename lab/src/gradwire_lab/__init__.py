"""gradwire-lab: baselines to compare gradwire's algorithms with, and experiments.

Compressors, planners and commands are found through gradwire's registries. What enters
the lab is held to the same laws as the library. It imports gradwire; gradwire never
imports it.
"""
