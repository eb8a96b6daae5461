"""The laws that compressors, collectives, exchanges and planners are held to, of
anybody's making.

* ``payloads``, ``compressors``: a compressor and a gradient; sizes, buffers, contents
* ``programs``: a compressor in the language; C++ agrees with the interpreter
* ``densities``: an algorithm with a setting ``density``; how much is taken
* ``collectives``: a collective with a codec, or any exchange; verbs, bytes, same bits
* ``exchanges``, ``many_steps``: an exchange; conservation, residuals, many steps
* ``bounded``: an exchange; residuals level off over 400 steps
* ``growth``: an exchange; means do not grow over many ranks and steps
* ``roundings``: an exchange of dense values; two roundings among any number of ranks
* ``ahead``: an exchange that encodes tensors before their message is whole
* ``planners``: a planner; its plans lose and double nothing
* ``inputs``, ``cases``: the inputs of laws, drawn from seeds, the small ones first
* ``subjects``: the laws of each kind, and how ``gradwire check`` tries one

A law is a function of the algorithm and one input. It raises ``LawBroken`` with what it
found. Its docstring says the law and, after "To do:", how to mend what breaks it. A law
that asks nothing of an algorithm on some input returns False there.
"""
