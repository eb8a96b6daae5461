"""Agreement: ranks compare what they must share, before they connect.

``fingerprint`` is what ranks compare. ``versions`` warns of versions that were not
tested.
"""
