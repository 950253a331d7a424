"""What a reproduction is asked for. `mtbench reproduce` and `mtbench.reproduce` have these options.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mtbench.records import Record
from mtbench.runs import option_texts as texts
from mtbench.runs import options
from mtbench.runs.options import BENCHMARK, COMPARED, DECODING, TIMING, option
from mtbench.runs.run_request import Session


class ReproduceRequest(Record):
    """The options of `mtbench reproduce`. None: the table's own value."""

    name: Annotated[str, option("A published table; without a name, list all tables.", BENCHMARK, argument=True)] = ""
    family: Annotated[
        options.Family,
        Field(description="Run only this family; another than the table's replaces all of them."),
    ] = None
    suite: Annotated[
        Sequence[str],
        option("Run only this suite; another than the table's replaces all of them. Repeatable.", BENCHMARK),
    ] = ()
    checkpoint: options.Checkpoints = Field(default_factory=dict)
    limit: Annotated[options.ItemLimit, Field(description="Items per suite or subtask; default: as published.")] = None
    batch_size: Annotated[
        Sequence[options.BatchSize] | None,
        option(
            "One or several, such as 1,8; default: the table's.",
            TIMING,
            parse=texts.numbers(int),
            show=texts.joined,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        option("How often the first blocks are timed; default: the table's.", TIMING, ge=1, le=options.MOST_ROUNDS),
    ] = None
    max_new_tokens: Annotated[
        options.MaxNewTokens, Field(description="Maximum tokens of an answer; default: as published.")
    ] = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    engine: Annotated[
        options.EngineName | None,
        option("graph, eager (as papers measure) or invariant; default: the table's.", COMPARED),
    ] = None
    data_dir: options.DataDir = None
    offline: options.Offline = False
    protocol: Annotated[
        options.Protocol,
        option("paper: ignore stop strings while decoding and count as the paper does; or own.", DECODING),
    ] = "paper"
    seed: options.Seed = 0
    skip_unscorable: options.SkipUnscorable = False
    allow_unsandboxed_code: options.AllowUnsandboxedCode = False


class ReproduceSession(Session):
    """How one call carries out a reproduction."""

    dry_run: options.DryRun = False
    workers: options.Workers = None
    ray: options.Ray = None
