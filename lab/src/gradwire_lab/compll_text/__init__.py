"""The paper's C-like text: parsed, run on symbols, made a ``Program``. May import: all of dsl."""
