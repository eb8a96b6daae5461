"""Whole trainings that only developers compare: HSDP, shrinking, far hosts."""
