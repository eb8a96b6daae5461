"""Measuring a model and a cluster.

May import: all but report and cli.
"""
