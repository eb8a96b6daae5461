"""Hot loops on the CPU: each a torch reference, which is its definition, and C++ in csrc.

Operands are 1-D contiguous tensors that the caller owns and reuses; nothing here allocates in
steady state. The C++ serves float32 on the CPU, the reference everything else. Results do not
depend on the number of threads. ``compiler`` builds the libraries, those of generated kernels too,
and keeps them. May import: errors, units, torch.
"""
