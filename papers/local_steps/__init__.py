"""Runs of papers on local steps: their outer steps, and the environment of one.

They have no page: docs/measured.md has what was measured. ``outer_steps`` trains by the
outer steps of several papers, and ``uneven`` in HALoS' environment.
"""
