"""The Triton back end: text, the library it calls, launching.

May import: ir, interp, schedule, operators.
"""
