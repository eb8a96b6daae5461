"""Model definitions, their work and the throughput model behind
``gradwire.planning.catalogue``.
"""
