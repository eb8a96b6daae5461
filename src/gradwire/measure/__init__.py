"""Measuring a model (layers), a cluster (links, allreduce) and compressors (codecs).

An engine is handed in where ranks measure together, as measuring starts no ranks.
"""
