"""CompLL: a compressor is a few lines of Python that become fused C++ loops.

    language   the operators a program is written with; symbols: the scalars it is traced on
       |       (a map leaves no node behind: a vector *is* the expression of its element)
    ir         frozen nodes, the table of legal ones, the verifier
       |
    rewrite    decode into encode (the residual) and into merge; constants folded
       |
       +-- interp, philox: the definition, every operation over torch tensors
       |
    schedule   passes over a block: what can be computed once which reductions are known
    render_cpp one readable C++ function a kernel; csrc/compll.h is its library
    build      compiled through the kernels' cache, loaded, called
       |
    program    a class with ``encode`` and ``decode`` becomes a compressor; generated: its methods

Source: HiPress (CompLL), section 4, table 4. May import: errors, units, spec, payload, contract,
trace, load, kernels.
"""
