"""``gradwire bench schedule``: planners on real links, with models replayed from
profiles.
"""
