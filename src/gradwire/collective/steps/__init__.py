"""Moves that several collectives are made of: cutting, telling sizes, pushing, merging, writing.

Each is a text, or a function that texts call.
"""
