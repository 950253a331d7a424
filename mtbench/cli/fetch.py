"""`mtbench fetch`: write a bundle, one file with the data and checkpoints of a run without a network."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    FamilyOption,
    ModelOption,
    OfflineOption,
    SkipOption,
    absolute,
    checkpoints,
)
from mtbench.cli.session import say
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.runs.run_request import RunRequest

app = typer.Typer()


@app.command()
def fetch(
    bundle: Annotated[Path, Option("--bundle", help="File to write, such as bundle.tar.")],
    suite: Annotated[list[str], Option("--suite", help="Suite as NAME or NAME:REST. Repeatable.")],
    family: FamilyOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    role: Annotated[
        list[str], Option("--role", help="Only this role of the family. Repeatable; default: all roles.")
    ] = [],  # noqa: B006
    no_checkpoints: Annotated[bool, Option("--no-checkpoints", help="Pack data only.")] = False,
    data_dir: DataOption = None,
    offline: OfflineOption = False,
    skip_unscorable: SkipOption = False,
) -> None:
    """Pack data and checkpoints for a machine without a network.

    On that machine, use the file with `mtbench run --bundle FILE.tar --offline`.
    """
    from mtbench.runs.bundle import write_bundle  # imports torch
    from mtbench.runs.prompts import open_suite

    if no_checkpoints and role:
        raise UserError("--role and --no-checkpoints contradict each other; give one of them.")
    overrides = checkpoints(checkpoint)
    packed = None if no_checkpoints else _family(suite, family, model, overrides)
    request = RunRequest(
        suite=suite,
        data_dir=absolute(data_dir),
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


def _family(suites: list[str], name: str | None, model: str | None, overrides: dict[str, str]) -> Family:
    """Return the family to pack. Raises UserError if the suites' families differ and none is named."""
    named = {name or SUITES[spec.partition(":")[0]].family for spec in suites}
    if len(named) > 1 and model is None:
        raise UserError(
            f"these suites use different checkpoints by default ({', '.join(sorted(named))}); name one family with "
            "`--family` or one checkpoint with `--model`, or pack data only with `--no-checkpoints`."
        )
    return families.family(min(named), model, overrides)
