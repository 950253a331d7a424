"""Makes the runs of `audit_corpus.py`: honest ones, and ones during which a fault of audit_faults.py is in force."""

import fcntl
import itertools
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
from mtbench.files import write_text
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
EXAMPLES = Path(__file__).parents[1] / "examples/prompts.jsonl"


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
    fails: bool = False  # the plan is not kept: the exit code must be 1


class Maker:
    """Makes runs in a folder, each once."""

    def __init__(self, folder: Path, real: str | None, data_dir: str | None = None) -> None:
        self.folder, self.real, self.data_dir = folder, real, data_dir
        self.windowed, self.examples = folder / "windowed", folder / "examples.jsonl"
        write_text(self.examples, EXAMPLES.read_text())  # the same place for any checkout that audits the runs
        if not self.windowed.exists():
            windowed(Path(locate("embedded:tiny/ar")), self.windowed, 40, (1, 2, 3))

    def request(self, model: str, asked: Mapping[str, Any], arms: Sequence[str]) -> RunRequest:
        """Return a request with the defaults of the corpus."""
        given: dict[str, Any] = {"limit": 8, "batch_size": (4,), "max_new_tokens": 64, "dtype": "float32"}
        given["family"] = None if model == REAL else TINY
        if model == WINDOWED:
            given["checkpoint"] = {"ar": str(self.windowed)}
        if model == REAL:
            given |= {"limit": 4, "model": self.real, "suite": (f"prompts:{self.examples}",), "dtype": "bfloat16"}
            given |= {"max_new_tokens": 40}
        given |= asked
        return RunRequest(**{"device": "cpu", "rounds": 1, "offline": True, "method": tuple(arms), **given})

    def run(self, request: RunRequest, name: str, fault: Fault = nullcontext) -> Path:
        """Plan, decode and score. A run that is there is used again; another process may make it."""
        path = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (path / "done").exists():
                shutil.rmtree(path, ignore_errors=True)
                self._make(request, path, fault)
        return path

    def _make(self, request: RunRequest, path: Path, fault: Fault) -> None:
        with fault():
            run = Run.open(begin_run(path, make_plan(request), ["mtbench", "run"]))
            generate(run, Quiet(), Execution(timed_only=True))
            score(run)
        failures = path / "failures.jsonl"
        if failures.exists() and failures.read_text().strip():
            print(failures.read_text()[:400])
        else:
            (path / "done").touch()


def prompts_with_system(folder: Path, systems: Sequence[str], name: str, limit: int = 16) -> str:
    """Write questions of the suite arithmetic with system prompts in turn; return the suite's name."""
    return _written(folder / f"{name}.jsonl", list(zip(itertools.cycle(systems), _questions(limit), strict=False)))


def dialogues(folder: Path, model: str) -> str:
    """Write 16 conversations of two turns with a system prompt; return the suite's name."""
    texts = _questions() if model == TINY else [json.loads(line)["prompt"] for line in EXAMPLES.open()]
    systems = ("You are a patient teacher who explains every step.", "Answer as a pirate.", "You write short poems.")
    first = "I am not sure. Please ask me something else first, and I will come back to it."
    turns = [[systems[n % 3], texts[n % len(texts)], first, texts[(n + 5) % 11]] for n in range(16)]
    return _written(folder / f"dialogues-{model}.jsonl", turns)


def _questions(limit: int = 16) -> list[str]:
    whole = SUITES["arithmetic"]("", Source())
    return [prompt.text for prompt in whole.prompts(lambda messages: str(messages[0]["content"]), limit)]


def _written(file: Path, conversations: Sequence[Sequence[str]]) -> str:
    """Write conversations, each a system prompt and turns; return the suite's name."""
    roles = ("system", *("user", "assistant") * 4)
    turns = [[{"role": r, "content": c} for r, c in zip(roles, texts, strict=False)] for texts in conversations]
    text = "".join(json.dumps({"id": f"q{n}", "messages": m}) + "\n" for n, m in enumerate(turns))
    write_text(file, text)
    return f"prompts:{file}"
