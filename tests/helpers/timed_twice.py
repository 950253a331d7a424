"""An experiment as an example: time one prompt twice, say the ratio. tests/test_experiment.py shows what it gets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments.experiment import Experiment, Job
from mtbench.options import common, texts
from mtbench.options.common import BENCHMARK, TIMING
from mtbench.options.fields import option
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import Session
from mtbench.records import Record, dump


class TwiceRequest(Record):
    """What is timed."""

    prompt: Annotated[str, option("Text to time.", BENCHMARK)] = "1 + 1"
    repeats: Annotated[int, option("Passes of each time.", TIMING, ge=1, le=9)] = 2
    limit_s: Annotated[
        float,
        option(
            "Longest time, such as 90s.",
            TIMING,
            gt=0,
            flags=("--time-limit",),
            parse=texts.seconds,
            show=texts.shown_seconds,
        ),
    ] = 60.0
    offline: common.Offline = False


class TimeLine(Record):
    """One time."""

    time_s: float


class Twice(Record):
    """What was found."""

    ratio: float


class TwicePlan(NamedTuple):
    """The request."""

    request: TwiceRequest


class TwiceExperiment(Experiment[TwiceRequest, Session, TwicePlan, Twice]):
    """Time one prompt twice; say the ratio."""

    command, begun_by, result, page = "twice", "request.json", "twice.json", "twice.md"
    request, session = TwiceRequest, Session

    def plan(self, request: TwiceRequest, session: Session) -> TwicePlan:
        if not request.prompt.strip():
            raise UserError("--prompt is empty; give a text.")
        return TwicePlan(request)

    def begin(self, directory: RunDirectory, planned: TwicePlan, argv: Sequence[str]) -> None:
        directory.write_json(self.begun_by, dump(planned.request))

    def stored(self, directory: Path) -> TwicePlan:
        return TwicePlan(RunDirectory(directory).read(self.begun_by, TwiceRequest))

    def run(self, job: Job[TwiceRequest, Session]) -> Twice:
        while len(times := job.directory.read_lines("times.jsonl", TimeLine)) < 2:
            job.directory.append("times.jsonl", [{"time_s": timed(job.request)}])
        found = Twice(ratio=times[1].time_s / times[0].time_s)
        job.directory.write_json(self.result, dump(found))
        job.directory.write_text(self.page, f"# The second time is {found.ratio:.2f} times the first\n")
        return found

    def show(self, job: Job[TwiceRequest, Session], found: Twice, console: Terminal) -> None:
        console.say(f"ratio {found.ratio:.2f}")


EXPERIMENT = TwiceExperiment()
TIMES: list[float | BaseException] = []


def timed(request: TwiceRequest) -> float:
    """The next time of a made-up clock."""
    time_s = TIMES.pop(0)
    if isinstance(time_s, BaseException):
        raise time_s
    return time_s * request.repeats
