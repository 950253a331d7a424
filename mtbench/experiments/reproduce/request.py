"""The request of a reproduction. `mtbench reproduce` and `mtbench.reproduce` have these options.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mtbench.options import common, texts
from mtbench.options.common import BENCHMARK, COMPARED, DECODING, TIMING
from mtbench.options.fields import option
from mtbench.plan.request import Session
from mtbench.records import Record


class ReproduceRequest(Record):
    """The options of `mtbench reproduce`. None: the table's own value."""

    name: Annotated[str, option("A published table; without a name, list all tables.", BENCHMARK, argument=True)] = ""
    family: Annotated[
        common.Family,
        Field(description="Run only this family; another than the table's replaces all of them."),
    ] = None
    suite: Annotated[
        Sequence[str],
        option("Run only this suite; another than the table's replaces all of them. Repeatable.", BENCHMARK),
    ] = ()
    checkpoint: common.Checkpoints = Field(default_factory=dict)
    limit: Annotated[common.ItemLimit, Field(description="Items per suite or subtask; default: as published.")] = None
    batch_size: Annotated[
        Sequence[common.BatchSize] | None,
        option(
            "One or several, such as 1,8; default: the table's.",
            TIMING,
            parse=texts.numbers(int),
            show=texts.joined,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        option("How often the first blocks are timed; default: the table's.", TIMING, ge=1, le=common.MOST_ROUNDS),
    ] = None
    max_new_tokens: Annotated[
        common.MaxNewTokens, Field(description="Maximum tokens of an answer; default: as published.")
    ] = None
    device: common.Device = "auto"
    dtype: common.Dtype = "auto"
    engine: Annotated[
        common.EngineName | None,
        option("graph, eager (as papers measure) or invariant; default: the table's.", COMPARED),
    ] = None
    chat_template_date: common.ChatTemplateDate = None
    data_dir: common.DataDir = None
    offline: common.Offline = False
    protocol: Annotated[
        common.Protocol,
        option("paper: ignore stop strings while decoding and count as the paper does; or own.", DECODING),
    ] = "paper"
    seed: common.Seed = 0
    skip_unscorable: common.SkipUnscorable = False
    allow_unsandboxed_code: common.AllowUnsandboxedCode = False


class ReproduceSession(Session):
    """How one call carries out a reproduction."""

    dry_run: common.DryRun = False
    workers: common.Workers = None
    ray: common.Ray = None
