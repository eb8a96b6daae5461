"""The paper's C-like text: parsed, run on symbols, made a ``Program`` of
`gradwire.dsl`.

``gradwire compll`` and users call ``compile_text``. It knows the language, and nothing
of ranks or training. It needs the extra ``gradwire-lab[text]``.
"""
