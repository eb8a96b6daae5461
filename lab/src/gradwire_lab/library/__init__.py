"""Operators of CompLL that a compressor of the lab needs; importing a file registers
its own.
"""
