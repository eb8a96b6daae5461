"""Measuring a model (layers), a cluster (links, allreduce) and compressors (codecs).

``gw.profile``, ``gradwire profile`` and ``auto`` call it. An engine is handed in where ranks
measure together; ``links_rank`` is the program of each rank, which gradwire-bench's testbed starts.
It knows no planner.
"""
