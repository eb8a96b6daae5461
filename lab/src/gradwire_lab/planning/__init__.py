"""Clocks and searches that the lab's planners share."""
