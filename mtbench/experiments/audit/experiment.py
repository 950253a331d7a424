"""`mtbench audit`: which answers of B differ from A's, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mtbench.document.console import Terminal
from mtbench.document.html_page import write
from mtbench.document.terminal import show
from mtbench.errors import UserError
from mtbench.experiments.audit import sides, texts
from mtbench.experiments.audit.document import document
from mtbench.experiments.audit.findings import Lines, all_pairs, arms_of, audit, reference, to_judge
from mtbench.experiments.audit.format import Audit, JudgedLine, NoiseLine
from mtbench.experiments.audit.judge import Judge, answer_of, coarse
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Named, Pair
from mtbench.experiments.experiment import Experiment, Job
from mtbench.hardware import machine
from mtbench.models.configuration import refuse_unreadable
from mtbench.models.families import locate
from mtbench.models.loading import inspect
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import Session
from mtbench.records import dump

ASKED, JUDGED, NOISE = "asked.json", "judged.jsonl", "noise.jsonl"
MEASURED = 192  # noise is measured at the tokens of an answer up to `TAIL` behind this one
FAULT = 1  # exit code
AuditJob = Job[AuditRequest, Session]


class Compared(NamedTuple):
    """The pairs of arms, and the checkpoint that judges."""

    pairs: list[Pair]
    model: str
    notes: Sequence[str]


class AuditPlan(NamedTuple):
    """The request, and what is compared; None: it is known when the audit runs."""

    request: AuditRequest
    compared: Compared | None


class AuditExperiment(Experiment[AuditRequest, Session, AuditPlan, Audit]):
    """Align two outputs, judge their first differences, and name the cause of each."""

    command, begun_by, result, page = "audit", ASKED, "audit.json", "audit.html"
    request, session = AuditRequest, Session

    def plan(self, request: AuditRequest, session: Session) -> AuditPlan:
        """Return the pairs of arms. Raises UserError for answers that cannot be compared."""
        if not request.a or not request.b:
            raise UserError(
                "an audit compares two outputs: `mtbench audit A B`, each DIR, DIR:ARM, DIR:CELL or a file."
            )
        return AuditPlan(request, _compared(request))

    def begin(self, directory: RunDirectory, planned: AuditPlan, argv: Sequence[str]) -> None:
        """Write the environment, then the request."""
        directory.write_json("environment.json", machine.environment(argv))
        directory.write_json(ASKED, dump(planned.request))

    def stored(self, directory: Path) -> AuditPlan:
        """Return the request; what is compared, and with which options, is known when it runs."""
        return AuditPlan(RunDirectory(directory).read(ASKED, AuditRequest), None)

    def run(self, job: AuditJob) -> Audit:
        """Judge the answers that are not judged yet, name the class of each, write audit.json and the page."""
        planned = job.plan.compared or _compared(job.request)
        judge = Judge(planned.model, job.request)
        lines = self._judged(job, planned, judge)
        noises = self._noises(job, planned, judge, lines) if lines else {}
        arms = arms_of(planned.pairs, lines, noises, judge.checkpoint)
        found = audit(job.request, planned.model if lines else None, arms, planned.notes)
        job.directory.write_json(self.result, dump(found))
        write(job.path, "audit", document(found, arms))
        return found

    def show(self, job: AuditJob, found: Audit, console: Terminal) -> None:
        """Print the classes and the first differences."""
        show(document(found, []), console)

    def exit_code(self, found: Audit, session: Session) -> int:
        """Return 0 if everything is explained without a fault."""
        return 0 if found.explained else FAULT

    def _judged(self, job: AuditJob, planned: Compared, judge: Judge) -> Lines:
        """Return the judged first differences by pair, an index of `all_pairs`, and item."""
        lines = {(line.pair, line.item): line for line in job.directory.read_lines(JUDGED, JudgedLine)}
        due = [
            (number, pair, item)
            for number, pair in enumerate(all_pairs(planned.pairs))
            for item in pair.items
            if to_judge(pair, item) and (number, item) not in lines
        ]
        with job.progress() as progress:
            for done, (number, pair, item) in enumerate(due, start=1):
                lines[number, item] = judge.judge(number, pair, item)
                job.directory.append(JUDGED, [dump(lines[number, item])])
                progress.show(f"judged {done} of {len(due)} answers")
        return lines

    def _noises(self, job: AuditJob, planned: Compared, judge: Judge, lines: Lines) -> dict[str, NoiseLine]:
        """Measure the noise of the number types that the sides ran in, on the answers of the side that is less off."""
        found = {line.dtype: line for line in job.directory.read_lines(NOISE, NoiseLine)}
        types = {coarse(side) for pair in planned.pairs for side in pair[:2]} - {None, *found}
        sides = {side.name: side for n, pair in enumerate(planned.pairs) for side in [reference(n, pair, lines)]}
        for dtype in filter(None, types):
            own_first = sorted(sides.values(), key=lambda side: coarse(side) != dtype)
            pairs = [(side, one) for side in own_first for one in side.answers.values()]
            answers = (answer_of(side, one, MEASURED) for side, one in pairs if one.prompt and one.tokens)
            found[dtype] = judge.noise(dtype, answers)
            job.directory.append(NOISE, [dump(found[dtype])])
        return found


def _compared(request: AuditRequest) -> Compared:
    """Return the pairs of arms. Raises UserError for answers that cannot be compared."""
    if request.a == request.b:
        raise UserError(f"A and B are the same, {request.a!r}; name two arms, DIR:ARM, or two batch sizes, DIR:CELL.")
    a, b = (_read(text, request) for text in (request.a, request.b))
    model = request.model or next((side.model for side in (*a.meant, *b.meant) if side.model), None)
    if model is None:
        raise UserError("neither A nor B says which model decoded; give it with `--model`.")
    judge = inspect(locate(model), offline=request.offline)
    refuse_unreadable(judge.source, judge.config, offline=request.offline)
    tasks = (side.task or {} for side in (*a.meant, *b.meant))
    date = next((str(task["template_date"]) for task in tasks if "template_date" in task), None)
    a, b = (texts.with_prompts(side, judge.tokenizer, date) for side in (a, b))
    paired = sides.pairs(a, b)
    found = [texts.with_tokens(pair, judge.tokenizer) for pair in paired]
    every = {side.name: (letter, side) for pair in found for letter, side in zip("AB", pair[:2], strict=True)}
    for _, side in every.values():
        sides.refuse_unknown_ids(side, judge.vocabulary)
        if side.model not in (None, model):
            sides.refuse_other_model(side, inspect(locate(str(side.model)), offline=request.offline), judge)
    return Compared(found, model, [note for letter, side in every.values() for note in texts.left_out(letter, side)])


def _read(text: str, request: AuditRequest) -> Named:
    """Return what an argument names: cells of a run, or a file of answers."""
    place = Path(sides.place_of(text))
    return sides.named(text, offline=request.offline) if place.is_dir() else texts.of_file(place, request.ran_in)


EXPERIMENT = AuditExperiment()
