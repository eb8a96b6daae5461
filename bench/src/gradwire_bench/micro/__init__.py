"""Single operations: kernels, exchanges, selection and partition against their
floors.
"""
