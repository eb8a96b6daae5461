"""CompLL: a few lines of Python become fused C++ loops and Triton kernels.

    language   the operators a program is written with; symbols: the scalars it is
       traced on |       (a map leaves no node behind: a vector *is* the expression of
       its element) |       stages: scalars of the whole gradient; selection: elements
       that a filter kept
    ir         frozen nodes, the table of legal ones, the verifier
       |
    rewrite    decode into encode (the residual) and into merge; stages; simplify:
       constants folded | +-- interp, philox: the definition, every operation over torch
       tensors |
    schedule   passes over a block: what can be computed once which reductions are known
    render_cpp one readable C++ function a kernel; csrc/compll.h is its library
    build      compiled through the kernels' cache, loaded, called
       |
    gpu/       the same in Triton: render and its terms, device (what compll.h is
       there), build |
    program    a class with ``encode`` and ``decode`` becomes a compressor; generated:
       its methods |
    layout     where fields lie in a payload; steps, keeping: what happens between two
       kernels |
    operators  what may be added from outside, with all its forms
    e4m3       added so

The paper's C-like text becomes such a class too: ``gradwire_lab/compll_text``. Coders
of packed bytes and programs of matrices are in ``gradwire_lab/dsl``.

Source: HiPress (CompLL), section 4, table 4.
"""
