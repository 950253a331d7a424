"""`mtbench fetch`: write a bundle, one file with the data and checkpoints of a run without a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtbench.cli.parameters import command
from mtbench.cli.session import say
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.runs import options
from mtbench.runs.run_request import RunRequest

app = typer.Typer()


@app.command()
@command
def fetch(
    bundle: Annotated[Path, Option("--bundle", help="File to write, such as bundle.tar.")],
    suite: options.Suites,
    family: options.Family = None,
    model: options.Model = None,
    checkpoint: options.Checkpoints = {},  # noqa: B006
    role: Annotated[
        list[str], Option("--role", help="Only this role of the family. Repeatable; default: all roles.")
    ] = [],  # noqa: B006
    no_checkpoints: Annotated[bool, Option("--no-checkpoints", help="Pack data only.")] = False,
    data_dir: options.DataDir = None,
    offline: options.Offline = False,
    skip_unscorable: options.SkipUnscorable = False,
) -> None:
    """Pack data and checkpoints for a machine without a network.

    On that machine, use the file with `mtbench run --bundle FILE.tar --offline`.
    """
    from mtbench.runs.bundle import write_bundle  # imports torch
    from mtbench.runs.prompts import open_suite

    if no_checkpoints and role:
        raise UserError("--role and --no-checkpoints contradict each other; give one of them.")
    packed = None if no_checkpoints else _family(suite, family, model, checkpoint)
    request = RunRequest(
        suite=suite,
        data_dir=data_dir,
        offline=offline,
        skip_unscorable=skip_unscorable,
        allow_unsandboxed_code=True,  # nothing is executed here
    )
    suites = {spec: open_suite(spec, request) for spec in suite}
    roles = role
    if not roles and packed is not None:
        roles = list(packed.roles)
    files = write_bundle(bundle, suites, packed, roles, offline=offline)
    say(f"{len(files)} files, {sum(files.values()) / 1e6:,.1f} MB")
    say(bundle)


def _family(suites: Sequence[str], name: str | None, model: str | None, overrides: Mapping[str, str]) -> Family:
    """Return the family to pack. Raises UserError if the suites' families differ and none is named."""
    named = {name or SUITES[spec.partition(":")[0]].family for spec in suites}
    if len(named) > 1 and model is None:
        raise UserError(
            f"these suites use different checkpoints by default ({', '.join(sorted(named))}); name one family with "
            "`--family` or one checkpoint with `--model`, or pack data only with `--no-checkpoints`."
        )
    return families.family(min(named), model, overrides)
