"""Steps of several collectives: cutting, announcing sizes, pushing, merging, writing.

Each is a generator of verbs, or a function that such generators call. Exchanges that
communicate in the middle of their computation use them too. They know payloads and
places, and no compressor.
"""
