"""CompLL: a few lines of Python become fused C++ loops and Triton kernels.

A program passes through these modules in order:

* ``language``: the operators that a program is written with; ``symbols``: the scalars
  that it is traced on.
* ``ir``: frozen nodes, the table of legal nodes, and the verifier.
* ``rewrite``: decode becomes part of encode (the residual) and of merge; constants are
  folded. ``interp`` and ``philox`` define each operation in torch.
* ``schedule``: passes over a block.
* ``render_cpp``: one C++ function for each kernel, over the library csrc/compll.h;
  ``build`` compiles, loads and calls it. ``gpu/`` does the same in Triton.
* ``program``: a class with ``encode`` and ``decode`` becomes a compressor;
  ``generated``: its methods.

``operators`` adds operators from outside, in all their forms; ``e4m3`` is such one.

The paper's C-like text becomes such a class too: ``gradwire_lab/compll_text``. Coders
of packed bytes and programs of matrices are in ``gradwire_lab/dsl``.

Source: HiPress (CompLL), section 4, table 4.
"""
