"""The library's commands: ``doctor.py`` has the Typer app of ``gradwire doctor``.

Another package adds commands by entry points in the group of commands (see `registry`):
an app (``my_package.mine:app``, under the command's name), or a package with a command
in each file.
"""
