"""Schemes for sparse payloads that ZEN's paper compares with; gradwire finds each by
its file.
"""
