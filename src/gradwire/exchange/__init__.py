"""Wrappers of exchanges: they change a gradient before it is exchanged, or keep its residual.

An exchange inside a wrapper knows nothing of it, so any wrapper goes around any exchange, in the
order that each one's docstring asks for. Error feedback, the simplest, is in ``exchange``. May
import: exchange and all that it may.
"""
