"""Measuring a model (layers), a cluster (links, allreduce) and compressors (codecs).

An engine is handed in where ranks measure together; `*_rank` are what each of them runs, where
`testbed.ranks` starts them.
"""
