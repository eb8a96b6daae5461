"""The laws that compressors, collectives, exchanges and planners are held to, of
anybody's making.

    payloads, compressors   a compressor and a gradient: sizes and buffers; what is in a
    payload programs                a compressor in the language: C++ agrees with the
    interpreter densities               what has a setting ``density``: how much is
    taken collectives             a collective with a codec, or any exchange: verbs,
    bytes, same bits exchanges, many_steps   an exchange: conservation, residuals; what
    shows over many steps bounded                 an exchange: residuals level off over
    400 steps growth                  an exchange: means do not grow over many ranks and
    steps roundings               an exchange of dense values: two roundings among any
    number of ranks ahead                   an exchange that encodes tensors before
    their message is whole momentum                a momentum correction, which keeps
    its own account planners                a planner: nothing is lost or doubled in its
    plans inputs, cases           what they are tried with, drawn from seeds, the small
    first subjects                which laws a kind is held to, and how one goes:
    ``gradwire check``

A law is a function of the algorithm and one input. It raises ``LawBroken`` with what it
found. Its docstring says the law and, after "To do:", how to mend what breaks it. A law
that asks nothing of an algorithm on some input returns False there.
"""
