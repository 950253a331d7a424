"""`mtbench export CHECKPOINT --for ENGINE --out DIR`: a draft's files as a serving engine loads them."""

from typing import Annotated

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import say
from mtbench.errors import UserError
from mtbench.files import refuse_existing
from mtbench.options import common
from mtbench.options.common import COMPARED
from mtbench.options.fields import option

app = typer.Typer()


@app.command()
@command
def export(
    checkpoint: Annotated[
        str, option("Draft to export: a folder, a hub id or embedded:tiny/ROLE.", COMPARED, argument=True)
    ],
    engine: Annotated[str, option("The engine; `mtbench ls engines` lists them.", COMPARED, flags=("--for",))],
    out: common.NewFolder,
    offline: common.Offline = False,
) -> None:
    """Write a draft's files as a serving engine loads them.

    For vLLM a MARS model gets the entry of its mask token in config.json, and an EAGLE-3 draft in DeepSpec's format,
    which `mtbench train eagle` writes, gets vLLM's names. Medusa's heads become a folder of their own. A draft that the
    engine loads as it is, is refused.
    """
    from mtbench.decoding.registry import SERVING_ENGINES
    from mtbench.models.checkpoint_files import Layout, copy_with
    from mtbench.models.configuration import downloaded
    from mtbench.models.families import locate

    server = SERVING_ENGINES[engine]()
    refuse_existing(out)
    folder = downloaded(locate(checkpoint), offline=offline)
    layout = server.layout(folder)
    if layout == Layout():
        raise UserError(f"{server.title} needs nothing that {checkpoint!r} lacks; give it the checkpoint as it is.")
    copy_with(folder, layout, out)
    say(str(out))
