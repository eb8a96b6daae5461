"""Frameworks that wrap a model in DDP by themselves: one file for each.

A user's script imports its framework's file; gradwire itself never does. Every file
hooks in where the framework makes its DDP model, and where it saves and loads; they
share ``framework_attachment.py``. They need the extra ``gradwire[frameworks]``.
"""
