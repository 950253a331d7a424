"""`mtbench serve` as a serving engine: the command that starts it."""

import sys
from pathlib import Path

from mtbench.clients.serving_engine import HOST, Serving, ServingEngine
from mtbench.version import __version__


class MtbenchServe(ServingEngine):
    """One process of `mtbench serve` an arm. `--engine` does not name it: its arms name graph, eager or invariant."""

    title = "mtbench"

    def __init__(self, source: str) -> None:
        self.start = "mtbench", "serve", source  # type: ignore[misc]  # --family or --model

    def computing(self, dtype: str) -> tuple[str, ...]:
        return "--dtype", dtype

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        return [
            *(str(python), "-m", *self.start, serving.model),
            *("--host", HOST, "--port", str(port), *self.computing(serving.dtype)),
            *("--max-num-seqs", str(serving.rows), "--max-length", str(serving.positions)),
            *serving.setting.words,
            *serving.options,
        ]

    @classmethod
    def release(cls) -> str:
        return __version__

    @classmethod
    def python(cls) -> Path:
        return Path(sys.executable)
