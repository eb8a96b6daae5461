"""The library's commands: ``doctor.py`` is ``gradwire doctor``, a Typer app called
``app``.

Another package adds commands by entry points in the group of commands (see `registry`):
an app (``my_package.mine:app``, under the command's name), or a package with a command
in each file.
"""
