"""Compressors of the lab, one in each file; ``gw.compress`` finds them."""
