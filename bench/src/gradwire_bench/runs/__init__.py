"""Whole trainings that only developers compare: HSDP, shrinking, the matrix of
programs.
"""
