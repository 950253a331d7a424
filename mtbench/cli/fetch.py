"""`mtbench fetch`: what a run needs, in one file to carry to a machine without a network."""

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from mtbench.cli.request_options import CheckpointOption, DataOption, role_and_path
from mtbench.errors import UserError

out = Console()


def fetch(
    bundle: Annotated[Path, Option("--bundle", help="The file to make, such as bundle.tar.")],
    suite: Annotated[list[str], Option("--suite", help="Suite, or name:rest. Repeats.")],
    family: Annotated[str | None, Option("--family", help="Checkpoints that belong together.")] = None,
    model: Annotated[str | None, Option("--model", help="Path or hub id: a family with the role ar alone.")] = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    role: Annotated[list[str], Option("--role", help="Of the family, this role. Repeats; default: all.")] = [],  # noqa: B006
    no_checkpoints: Annotated[bool, Option("--no-checkpoints", help="Carry data alone.")] = False,
    data_dir: DataOption = None,
    offline: Annotated[bool, Option("--offline", help="Only what is on this machine already.")] = False,
    skip_unscorable: Annotated[
        bool, Option("--skip-unscorable", help="Do without what would score some of the items.")
    ] = False,
) -> None:
    """Carry suites' data, tokenizers and checkpoints in one file: `mtbench run --bundle FILE.tar --offline` there."""
    from mtbench.evaluation.registry import SUITES
    from mtbench.models import families
    from mtbench.runs.bundle import write_bundle
    from mtbench.runs.plan import RunRequest
    from mtbench.runs.prompts import open_suite

    if no_checkpoints and role:
        raise UserError("--role names a checkpoint to carry, and --no-checkpoints carries none; give one of them.")
    overrides = dict(role_and_path(text) for text in checkpoint)
    wanted = {family or SUITES[spec.partition(":")[0]].family for spec in suite}
    if len(wanted) > 1 and model is None and not no_checkpoints:
        raise UserError(
            f"these suites run on different checkpoints when none are named ({', '.join(sorted(wanted))}); name them "
            "with `--family` or `--model`, or carry data alone with `--no-checkpoints`."
        )
    chosen = None if no_checkpoints else families.family(min(wanted), model, overrides)
    request = RunRequest(
        suite=suite,
        data_dir=None if data_dir is None else str(data_dir.resolve()),
        offline=offline,
        skip_unscorable=skip_unscorable,
        allow_unsandboxed_code=True,  # none is run here
    )
    suites = {spec: open_suite(spec, request) for spec in suite}
    files = write_bundle(bundle, suites, chosen, role or (chosen.roles if chosen else ()), offline=offline)
    out.print(f"{len(files)} files, {sum(files.values()) / 1e6:,.1f} MB", highlight=False)
    out.print(str(bundle), soft_wrap=True, markup=False, highlight=False)
