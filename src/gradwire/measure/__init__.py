"""Measuring a model (layers), a cluster (links) and compressors (codecs).

``gw.profile``, ``gradwire profile`` and ``auto`` call it. An engine is handed in where
ranks measure together. It knows no planner.
"""
