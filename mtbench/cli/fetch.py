"""`mtbench fetch engine NAME`: install a serving engine in an environment of its own, in the cache folder."""

from typing import Annotated, Literal

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import say

app = typer.Typer()


@app.command()
@command
def fetch(
    what: Annotated[Literal["engine"], typer.Argument(help="engine.")],
    name: Annotated[str, typer.Argument(help="The engine; `mtbench ls engines` lists them.")],
) -> None:
    """Install a serving engine in an environment of its own.

    Its version is pinned. An environment that is there is kept.
    """
    from mtbench.decoding.registry import SERVING_ENGINES

    say(str(SERVING_ENGINES[name].fetch(say)))
