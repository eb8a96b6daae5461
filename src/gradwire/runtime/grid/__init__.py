"""The grid of ranks: hosts of several ranks, ranks that hold other shards, DTensors.

``attach`` asks it which ranks average with this one. It knows meshes and groups, and no
gradients.
"""
