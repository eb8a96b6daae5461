"""Agreement: ranks compare in torch's store what all of them must share, before they
connect.

``fingerprint`` is what ranks compare. ``versions`` warns of versions that were not
tested.
"""
