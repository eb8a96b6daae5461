"""Exchanges: one gradient's way from a rank's values to the mean of all ranks.

``pair`` makes one of a compressor and a collective; the other files wrap one. A wrapper
changes a gradient before it is exchanged, or keeps its residual, and any wrapper goes
around any exchange. ``by_name`` finds exchanges for algorithms and names; ``local``
runs all ranks in one process.
"""
