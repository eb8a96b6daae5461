"""Say which compressors are installed; an example of a command of your own."""

import typer

import gradwire as gw

app = typer.Typer()


@app.command()
def greet() -> None:
    """Say which compressors are installed."""
    print(f"hello from own-package; gradwire has {', '.join(dir(gw.compress))}")
