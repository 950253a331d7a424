"""`mtbench fetch engine NAME`: install a serving engine in an environment of its own, in the cache folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import say
from mtbench.options.common import COMPARED
from mtbench.options.fields import option

app = typer.Typer()


@app.command()
@command
def fetch(
    what: Annotated[Literal["engine"], option("engine.", COMPARED, argument=True)],
    name: Annotated[str, option("The engine; `mtbench ls engines` lists them.", COMPARED, argument=True)],
    program: Annotated[
        Path | None,
        option("Use an installation of yours: the Python that has the engine, or llama-server.", COMPARED),
    ] = None,
) -> None:
    """Install a serving engine, or use an installation of yours.

    It gets an environment of its own, with a pinned version. An environment that is there is kept.
    """
    from mtbench.decoding.registry import SERVING_ENGINES

    engine = SERVING_ENGINES[name]
    say(str(engine.fetch(say)) if program is None else f"{name} is {engine.use(program)}")
