"""A plugin file with an engine that keeps blocks of prompts. The fault of its cache is that of the release's script."""

import json
import sys
from pathlib import Path
from typing import ClassVar

from mtbench.clients.serving_engine import Serving, ServingEngine, Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES

sys.path.append(str(Path(__file__).parent))  # mtbench imports this file alone
import block_cache
from scripted_engine import SCRIPT


@SERVING_ENGINES.register("blocks")
class Blocks(ServingEngine):
    title = "Blocks"
    start = ("blocks",)
    package = "blocks==1"
    caches = True
    methods: ClassVar[Table] = {
        "ar": lambda method, drafts: Setting(""),
        "prompt-lookup": lambda method, drafts: Setting("ngram"),
    }

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        fault = json.loads((self.folder() / SCRIPT).read_text())["fault"]
        drafts = ["drafts"] if serving.setting.name else []
        return [str(python), block_cache.__file__, str(port), fault, *drafts]
