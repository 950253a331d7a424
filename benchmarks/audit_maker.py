"""Makes the runs of `audit_corpus.py`: honest ones, and ones during which a fault of audit_faults.py is in force."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
from mtbench.lineup.planner import begin_run, make_plan
from mtbench.measure.executor import generate
from mtbench.measure.score import score
from mtbench.models.families import locate
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from audit_loop_faults import CorpusLookup, windowed
from planted_faults import Fault
from whole import Quiet

METHODS.register("corpus-lookup")(CorpusLookup)
TINY, WINDOWED, REAL = "tiny", "windowed", "real"


class Plant(NamedTuple):
    """A fault as one variant. `made`: while B is planned, decoded and scored; `always`: while A is, too."""

    fault: str
    variant: str
    expected: str
    made: Fault = nullcontext
    model: str = TINY
    request: Mapping[str, Any] = {}  # of both
    other: Mapping[str, Any] = {}  # of B
    arms: tuple[str, str] = ("ar", "ar")
    form: str = "runs"  # or "text": B is a file of lm-eval's samples; "texts": A and B are
    always: Fault = nullcontext


class Maker:
    """Makes runs in a folder, each once."""

    def __init__(self, folder: Path, real: str | None, data_dir: str | None = None) -> None:
        self.folder, self.real, self.data_dir = folder, real, data_dir
        self.windowed = windowed(Path(locate("embedded:tiny/ar")), folder / "windowed", 40, (1, 2, 3))

    def request(self, model: str, asked: Mapping[str, Any], arms: Sequence[str]) -> RunRequest:
        """Return a request with the defaults of the corpus."""
        given: dict[str, Any] = {"limit": 8, "batch_size": (4,), "max_new_tokens": 64, "dtype": "float32"}
        given["family"] = None if model == REAL else TINY
        if model == WINDOWED:
            given["checkpoint"] = {"ar": str(self.windowed)}
        if model == REAL:
            prompts = Path(__file__).parents[1] / "examples/prompts.jsonl"
            given |= {"limit": 4, "model": self.real, "suite": (f"prompts:{prompts}",), "dtype": "bfloat16"}
            given |= {"max_new_tokens": 40}
        given |= asked
        return RunRequest(**{"device": "cpu", "rounds": 1, "offline": True, "method": tuple(arms), **given})

    def run(self, request: RunRequest, name: str, fault: Fault = nullcontext, *, score_it: bool = True) -> Path:
        """Plan, decode and score. A run that is there is used again."""
        path = self.folder / name
        if (path / "done").exists():
            return path
        with fault():
            run = Run.open(begin_run(path, make_plan(request), ["mtbench", "run"]))
            generate(run, Quiet(), Execution(timed_only=True))
            score(run)
        failures = path / "failures.jsonl"
        if failures.exists() and failures.read_text().strip():
            print(failures.read_text()[:400])
        (path / "done").touch()
        return path


def prompts_with_system(folder: Path, systems: Sequence[str], name: str, limit: int = 16) -> str:
    """Write questions of the suite arithmetic with system prompts in turn; return the suite's name."""
    texts = SUITES["arithmetic"]("", Source()).prompts(lambda messages: str(messages[0]["content"]), limit)
    file = folder / f"{name}.jsonl"
    turns = [
        [{"role": "system", "content": systems[n % len(systems)]}, {"role": "user", "content": prompt.text}]
        for n, prompt in enumerate(texts)
    ]
    file.write_text("".join(json.dumps({"id": f"q{n}", "messages": m}) + "\n" for n, m in enumerate(turns)))
    return f"prompts:{file}"
