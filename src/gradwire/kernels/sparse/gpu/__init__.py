"""The partition on a GPU, in Triton: algorithm 1 with its hash table, and the two passes.

May import: errors, entries, parts, permutation, partition's types, torch; triton where a kernel is
launched.
"""
