"""Traces: spans of work on lanes, and their Chrome/Perfetto form.

Tables and pictures are drawn from traces only, so predicted, simulated and measured
timelines are the same kind of thing. The runtime, the simulator and the command line
use it; it knows neither.
"""
