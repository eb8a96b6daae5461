"""ZEN's algorithm 1 on a GPU, in Triton: the partition by a hash table."""
