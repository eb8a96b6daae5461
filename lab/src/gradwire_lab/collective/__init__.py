"""Collectives beside gradwire's own: schemes that ZEN's paper compares with, and
HiPress's ring. gradwire finds each by its file.
"""
