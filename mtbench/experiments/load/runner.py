"""Run the points of a load in its directory.

    environment.json, plan.json   written first
    tokenizer/                    of the checkpoint, for the client
    servers.json                  what answered for each arm
    points.jsonl                  a line per point, appended as the point ends
    work/                         logs; input and exports of the client until they are read
    scores.json                   point -> scores of its answers, null without an answer

Points run one at a time. In every round each arm gets a server of its own, so that what differs between two starts of
a server is in the intervals. A killed load resumes behind its last line.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import RootModel

from mtbench.errors import UserError
from mtbench.evaluation.suite import suite_errors
from mtbench.experiments.load import servers
from mtbench.experiments.load.aiperf import Client, Sending
from mtbench.experiments.load.format import LoadPlan, PointLine, PointPlan, RequestLine, ServerFacts
from mtbench.experiments.load.planning import run_request
from mtbench.experiments.load.servers import Running
from mtbench.hardware import machine
from mtbench.measure.score import before, behind
from mtbench.models.loading import inspect
from mtbench.plan.directory import RunDirectory
from mtbench.plan.prompts import open_suite
from mtbench.programs.machine_share import throttled_s
from mtbench.programs.processes import utc_now
from mtbench.records import dump

PLAN, POINTS, SERVERS, SCORES = "plan.json", "points.jsonl", "servers.json", "scores.json"
TOKENIZER, WORK = "tokenizer", "work"
ADVICE = "restore it, or start another load with `mtbench load -o DIR`."
Note = Callable[[str], None]
Scores = dict[str, list[float | None]]  # point -> score of each request


class StoredServers(RootModel[dict[str, ServerFacts]]):
    """servers.json."""


class StoredScores(RootModel[Scores]):
    """scores.json."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A load in its directory, with the client that sends its requests."""

    run: RunDirectory
    planned: LoadPlan
    client: Client
    note: Note

    def missing(self) -> list[PointPlan]:
        """Return the points that have not ended, in their order."""
        done = {line.point for line in read_points(self.run, self.planned)}
        return [point for point in self.planned.points if point.point not in done]

    def send(self, python: Path, deadline: float = float("inf")) -> None:
        """Run the points that are missing, with the client's `python`. None begins after `deadline` (time.monotonic).

        Raises UserError if a server or the client fails; the points before are kept.
        """
        missing = self.missing()
        done = len(self.planned.points) - len(missing)
        self._write_tokenizer()
        for (_, arm), turn in itertools.groupby(missing, key=lambda point: (point.round, point.arm)):
            if time.monotonic() > deadline:
                return
            with self._served(arm) as running:
                for point in turn:
                    if time.monotonic() > deadline:
                        return
                    line = self._point(point, running, python)
                    self.run.append(POINTS, [dump(line)])
                    done += 1
                    self.note(f"{done} of {len(self.planned.points)}: round {line.round}, {_counts(line)}")
        shutil.rmtree(self.run.path / WORK, ignore_errors=True)

    @contextmanager
    def _served(self, arm: str) -> Iterator[Running]:
        with servers.running(self.planned, self.planned.arm(arm), self.run.path / WORK / "server") as running:
            self._write_server(arm, running)
            running = running._replace(fields={**running.fields, **self.planned.fields})
            servers.warm_up(running, self.planned)
            yield running

    def _point(self, point: PointPlan, running: Running, python: Path) -> PointLine:
        sending = Sending(self.planned, point, running, self.run.path / TOKENIZER)
        folder = self.run.path / WORK / point.point
        shutil.rmtree(folder, ignore_errors=True)
        if running.prefix_cache:
            servers.warm_up(running, self.planned)
        started, gpu = utc_now(), machine.gpu() if running.command is not None else None
        before_j, before_s = None if gpu is None else gpu.energy_j(), throttled_s()
        requests = self.client.send(python, sending, folder)
        after_s = throttled_s()
        after_j = None if gpu is None else gpu.energy_j()
        shutil.rmtree(folder, ignore_errors=True)
        return PointLine(
            point=point.point,
            round=point.round,
            arm=point.arm,
            level=point.level,
            started=started,
            window_s=window_s(requests, sending.duration_s),
            energy_j=None if before_j is None or after_j is None else after_j - before_j,
            throttled_s=None if before_s is None or after_s is None else max(0.0, after_s - before_s),
            requests=requests,
        )

    def _write_tokenizer(self) -> None:
        """Store the tokenizer for the client, which may not find it by the checkpoint's name."""
        folder = self.run.path / TOKENIZER
        if not folder.is_dir():
            partial = folder.with_name(f"{TOKENIZER}.partial")
            checkpoint = inspect(self.planned.tokenizer, offline=self.planned.request.offline, needs_mask=False)
            checkpoint.tokenizer.save_pretrained(partial)
            partial.rename(folder)

    def _write_server(self, arm: str, running: Running) -> None:
        servers = read_servers(self.run)
        url = running.server.url if running.command is None else None
        facts = ServerFacts(name=arm, model=running.model, command=running.command, engine=running.engine, url=url)
        if servers.get(arm) is None:
            self.run.write_json(SERVERS, {name: dump(entry) for name, entry in {**servers, arm: facts}.items()})
        elif servers[arm].model != running.model:
            raise UserError(
                f"{arm!r} served the model {servers[arm].model!r} before and serves {running.model!r} now; start "
                "another load with another `-o DIR`."
            )

    def score(self) -> None:
        """Write scores.json: the score of every answer, as the suite gives it; nothing for a suite without a metric."""
        if self.planned.metric is None:
            return
        spec = self.planned.request.suite
        suite = open_suite(spec, run_request(self.planned.request))
        cuts = {item.item: item.cut for item in self.planned.items}
        scored = {item.item for item in self.planned.items if item.scored}
        points = read_points(self.run, self.planned)
        answers = {point.point: [_answer(line, cuts[line.item]) for line in point.requests] for point in points}
        scored_texts: dict[tuple[str, str], float] = {}  # by item and text
        answered = (answer for point in answers.values() for answer in point if answer is not None)
        for texts in passes(answer for answer in answered if answer[0] in scored):
            with suite_errors(spec):
                by_item = suite.score(texts)
            scored_texts |= {(item, text): float(by_item[item]) for item, text in texts.items()}
        scores = {
            point: [None if answer is None else scored_texts.get(answer) for answer in given]
            for point, given in answers.items()
        }
        self.run.write_json(SCORES, scores, indent=None)


def passes(answers: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return dictionaries item -> text that together hold every pair once: a suite scores one text per item at a time.

    >>> passes([("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")])
    [{'a': '1', 'b': '1'}, {'a': '2'}]
    """
    texts: dict[str, list[str]] = {}
    for item, text in dict.fromkeys(answers):
        texts.setdefault(item, []).append(text)
    most = max(map(len, texts.values()), default=0)
    return [{item: given[n] for item, given in texts.items() if n < len(given)} for n in range(most)]


def _answer(line: RequestLine, cut: Sequence[str]) -> tuple[str, str] | None:
    return None if line.text is None else (line.item, behind(before(line.text, cut), None))


def window_s(requests: Sequence[RequestLine], planned_s: float) -> float:
    """Return the time that a point's rates are over: to its last answer, but at least the planned time of sending."""
    ends = [line.start_s + (line.e2e_s or 0.0) for line in requests]
    return max([planned_s, *ends])


def read_points(run: RunDirectory, planned: LoadPlan) -> list[PointLine]:
    """Return the points that have ended. Raises UserError for a line that does not belong to the plan."""
    planned_points = {point.point: point for point in planned.points}
    lines = run.read_lines(POINTS, PointLine)
    for line in lines:
        point = planned_points.get(line.point)
        items = [] if point is None else [planned.items[place].item for place in point.items]
        if point is None or items != [request.item for request in line.requests]:
            raise UserError(f"{run.path / POINTS} has a point {line.point!r} that is not planned; start another load.")
    return lines


def read_servers(run: RunDirectory) -> dict[str, ServerFacts]:
    """Return what answered for each arm so far."""
    return run.read(SERVERS, StoredServers).root if run.has(SERVERS) else {}


def read_scores(run: RunDirectory) -> Scores:
    """Return the scores by point; none for a suite without a metric."""
    return run.read(SCORES, StoredScores).root if run.has(SCORES) else {}


def _counts(line: PointLine) -> str:
    ok = sum(request.outcome == "ok" for request in line.requests)
    return f"{line.arm} at {line.level:g}: {ok} of {len(line.requests)} answered in {line.window_s:.1f} s"
