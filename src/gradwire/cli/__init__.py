"""The command line, one verb a file: ``cli/commands/doctor.py`` is ``gradwire doctor``.

A verb's file has ``app``, a ``typer.Typer``, and a docstring whose first line is its line in
``gradwire --help``. It is imported when its verb is asked for. Files that start with an underscore
are support. May import everything; nothing imports this package.
"""
