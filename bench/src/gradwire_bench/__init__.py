"""Measurements on real sockets: the demo and the benchmarks, and the programs their ranks run.

Every comparison runs both sides in one run, in turn; bytes are read from the interfaces. May import
all rows above it; only cli imports it.
"""
