"""Hot loops on the CPU: torch references, which define them, and C++ in csrc.

Compressors, sparse collectives and CompLL call them. The room knows 1-D contiguous
tensors, which its caller owns and reuses; it knows no compressor, payload layout or
rank. The C++ serves float32 on the CPU and the reference everything else, with results
that no number of threads changes. ``compiler`` builds and keeps these libraries, and
generated ones.
"""
