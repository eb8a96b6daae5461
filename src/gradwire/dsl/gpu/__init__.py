"""The Triton back end of CompLL: text, the library that it calls, launching.

A compiled program calls it for tensors on a GPU. It knows the IR and its schedule, and
neither the classes that users write nor payloads.
"""
