"""The command line: ``main`` finds commands, ``commands/`` has the library's.

A command's file has ``app``, a ``typer.Typer``, and a docstring whose first line is its
line in ``gradwire --help``. It is imported when it is asked for. The room may import
everything of the library; nothing of the library imports it.
"""
