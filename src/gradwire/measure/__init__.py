"""Measuring a model (layers), a cluster (links) and compressors (codecs).

``gw.profile`` and ``auto`` call it, and gradwire-bench's command ``gradwire profile``.
An engine is handed in where ranks measure together. It knows no planner.
"""
