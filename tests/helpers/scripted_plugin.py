"""A plugin file with the scripted engine. Its server's script is that of the release (scripted_engine.install)."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.serving_engine import Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES

sys.path.append(str(Path(__file__).parent))  # mtbench imports this file alone
from scripted_engine import SCRIPT, Scripted


@SERVING_ENGINES.register("scripted")
class Installed(Scripted):
    """An engine that reads its script where it is installed."""

    package = "scripted==1"
    constraint = staticmethod(lambda schema: {"schema": schema})
    fields: ClassVar[Mapping[str, Any]] = {"cached": False}
    methods: ClassVar[Table] = {
        "ar": lambda method, drafts: Setting(""),
        "prompt-lookup": lambda method, drafts: Setting("ngram"),
    }

    def __init__(self) -> None:
        file = self.folder() / SCRIPT
        super().__init__(json.loads(file.read_text()) if file.is_file() else {})
