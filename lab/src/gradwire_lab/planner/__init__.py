"""Planners of the lab, one in each file; ``gw.plan`` finds them by name."""
