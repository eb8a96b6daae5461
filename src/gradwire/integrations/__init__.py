"""Frameworks that wrap a model in DistributedDataParallel by themselves: one file for each.

They need the extra ``frameworks``. Every file hooks in where the framework makes its DDP model, and
where it saves and loads; ``attachment.py`` is what they share.
"""
