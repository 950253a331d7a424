"""The request of an audit. `mtbench audit` and `mtbench.audit` have these options.

Light: the command line makes its help of this file without torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtbench.options import common
from mtbench.options.common import COMPARED, MACHINE
from mtbench.options.fields import option
from mtbench.plan.request import Session as Session  # of its calls
from mtbench.records import Record

Precision = Literal["float64", "float32", "bfloat16", "float16"]
NAMED = "DIR, DIR:ARM, DIR:CELL or a file of answers."


class AuditRequest(Record):
    """The options of `mtbench audit`."""

    a: Annotated[str, option(f"The answers to compare with: {NAMED}", COMPARED, argument=True)] = ""
    b: Annotated[str, option(f"The answers to explain: {NAMED}", COMPARED, argument=True)] = ""
    model: Annotated[
        common.Model,
        Field(description="Checkpoint that judges: folder, hub id or GGUF file; default: the one that A decoded with."),
    ] = None
    dtype: Annotated[Precision, option("Number type of the judge; float64 for the last word.", MACHINE)] = "float32"
    ran_in: Annotated[Precision, option("Number type in which a result file was computed.", MACHINE)] = "bfloat16"
    device: common.Device = "auto"
    offline: common.Offline = False
