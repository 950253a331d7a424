"""The request of an audit. `mtbench audit` and `mtbench.audit` have these options.

Light: the command line makes its help of this file without torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtbench.options import common
from mtbench.options.common import COMPARED, MACHINE
from mtbench.options.fields import option
from mtbench.plan.request import Session
from mtbench.records import Record

Precision = Literal["float64", "float32", "bfloat16", "float16"]


class AuditRequest(Record):
    """The options of `mtbench audit`."""

    a: Annotated[
        str,
        option(
            "The answers to compare with: DIR, DIR:ARM, DIR:CELL, a result file or METHOD.", COMPARED, argument=True
        ),
    ] = ""
    b: Annotated[
        str,
        option("The answers to explain: DIR, DIR:ARM, DIR:CELL, a result file or METHOD.", COMPARED, argument=True),
    ] = ""
    model: Annotated[
        common.Model,
        Field(description="Checkpoint that judges: folder, hub id or GGUF file; default: the one that A decoded with."),
    ] = None
    dtype: Annotated[Precision, option("Number type of the judge: float32, or float64 for the last word.", MACHINE)] = (
        "float32"
    )
    ran_in: Annotated[Precision, option("Number type that the answers of a result file were computed in.", MACHINE)] = (
        "bfloat16"
    )
    device: common.Device = "auto"
    offline: common.Offline = False


class AuditSession(Session):
    """How one call carries out an audit."""

    server: common.Servers = ()
