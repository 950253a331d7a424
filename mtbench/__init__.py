"""mtbench compares multi-token decoding methods on your model and your GPU, with confidence intervals.

The library, from one place: `run`, `choose`, `gate`, `load`, `audit` and `reproduce` do what the commands do, `read`
reads a run's results; the rest is for methods and suites of your own.
A name is imported when it is used, so that `import mtbench` is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mtbench.version import __version__

if TYPE_CHECKING:
    from mtbench.api import Chosen, Found, Results, audit, choose, gate, load, read, reproduce, run
    from mtbench.decoding.method import (
        NONE,
        Claims,
        Commit,
        Method,
        ModelRunners,
        Rows,
        State,
        TargetOutput,
        Window,
    )
    from mtbench.decoding.registry import METHODS
    from mtbench.errors import UserError
    from mtbench.evaluation.registry import SUITES
    from mtbench.evaluation.suite import Messages, Prompt, Reading, Source, Suite, Template
    from mtbench.options import AUTO, option

_MODULES = {
    "mtbench.api": ("Chosen", "Found", "Results", "audit", "choose", "gate", "load", "read", "reproduce", "run"),
    "mtbench.decoding.method": (
        "NONE",
        "Claims",
        "Commit",
        "Method",
        "ModelRunners",
        "Rows",
        "State",
        "TargetOutput",
        "Window",
    ),
    "mtbench.decoding.registry": ("METHODS",),
    "mtbench.errors": ("UserError",),
    "mtbench.evaluation.registry": ("SUITES",),
    "mtbench.evaluation.suite": ("Messages", "Prompt", "Reading", "Source", "Suite", "Template"),
    "mtbench.options": ("AUTO", "option"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AUTO",
    "METHODS",
    "NONE",
    "SUITES",
    "Chosen",
    "Claims",
    "Commit",
    "Found",
    "Messages",
    "Method",
    "ModelRunners",
    "Prompt",
    "Reading",
    "Results",
    "Rows",
    "Source",
    "State",
    "Suite",
    "TargetOutput",
    "Template",
    "UserError",
    "Window",
    "__version__",
    "audit",
    "choose",
    "gate",
    "load",
    "option",
    "read",
    "reproduce",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mtbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_OF]
