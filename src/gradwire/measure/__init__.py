"""Measuring a model (layers), a cluster (links, allreduce) and compressors (codecs).

May import: all but runtime (an engine is passed in), testbed, report, bench and cli.
"""
