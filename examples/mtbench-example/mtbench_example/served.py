"""`mtbench serve` as a serving engine: any server with OpenAI's API, token ids in and out."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.serving_engine import HOST, Serving, ServingEngine, Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES


def _lookup(method: Any, drafts: Mapping[str, str]) -> Setting:
    spec = f"prompt-lookup:ahead={method.ahead},ngram={method.ngram},min_ngram={method.min_ngram},match={method.match}"
    return Setting("prompt-lookup", ("--method", spec))


@SERVING_ENGINES.register("served")
class Served(ServingEngine):
    """One `mtbench serve` an arm."""

    title = "mtbench serve"
    start = ("mtbench", "serve", "--model")
    methods: ClassVar[Table] = {"ar": lambda method, drafts: Setting("", ("--method", "ar")), "prompt-lookup": _lookup}

    @classmethod
    def python(cls) -> Path:
        return Path(sys.executable)  # it is installed where mtbench is

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        return [
            *(str(python), "-m", "mtbench", "serve", "--model", serving.model, "--host", HOST, "--port", str(port)),
            *("--dtype", serving.dtype, "--device", "cpu"),
            *("--max-num-seqs", str(serving.rows), "--max-length", str(serving.positions)),
            *serving.setting.words,
            *serving.options,
        ]
