"""Execute a plan: decode its cells, and store answers and times.

Inside every block all arms run next to each other in random order, so that a drift of the machine affects them alike.
Needs torch and transformers only, except for private suites, whose prompts are read again. Blocks that are on disk are
kept; missing ones are run.
"""

import math
import shlex
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from mtbench import kernels
from mtbench.decoding.arms import is_served
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import counted, percent
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.lineup.gpu_memory import divided
from mtbench.lineup.planner import with_dtype
from mtbench.measure.block_writer import BlockWriter, Progress
from mtbench.measure.judging_time import expected_judging_s
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.stage import Stage
from mtbench.measure.time_budget import TimeBudget
from mtbench.measure.untimed import UntimedPasses
from mtbench.measure.workers import Worker, WorkerSession, in_parallel, start_workers
from mtbench.options.engine_options import refuse_engine_options
from mtbench.options.fields import fields_of
from mtbench.plan.formats import FailureLine, SessionRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.prompts import open_plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run

HERE = Execution()  # in this process, with the plan's values


def generate(run: Run, progress: Progress, execution: Execution = HERE) -> None:
    """Run the blocks of the plan that are not on disk yet.

    In this process, by workers on this machine, or by workers of a Ray cluster. Time budget and data folder are the
    plan's unless the execution has its own. Raises UserError if no cell can run, if the plan uses a server that the
    execution does not name, if the run started on another device or in another dtype, or if an answer of a timed
    block is missing.
    """
    run.refuse_unanswered()
    plan = open_plan(run, execution.data_dir, offline=execution.offline)
    if not execution.ray:  # a cluster has other machines
        plan = with_dtype(plan, run.sessions[0].dtype if run.sessions else None)
    in_this_process = execution.ray is None and execution.workers in (None, 1)
    pool = ModelPool(plan.request) if in_this_process else None
    budget_s = plan.request.time_budget_s if execution.time_budget_s is None else execution.time_budget_s
    budget = TimeBudget(budget_s, judged=not execution.timed_only, began=execution.began)
    failed, may_pass = _failed_cells(run, plan)

    def staged(recovered: Collection[str] = ()) -> list[Stage]:
        writers = [BlockWriter(run, plan, group, failed, progress) for group in plan.groups]
        return [Stage(writer, budget, execution, recovered) for writer in writers]

    stages = staged()
    if may_pass or any(stage.scheduler.work or stage.unprobed for stage in stages):
        if not execution.ray:
            plan = divided(plan, processes=1 if execution.wait is None else 2)
            stages = staged()
        _refuse_untrusted(run, plan, stages, execution)
        _say_what_fits(stages, budget, progress)
        progress.show("loading the models")
        with start_workers(pool, plan, execution) as workers:
            sessions = _begin(workers, run, progress)
            _say_if_busy(run.sessions[-1], progress)
            recovered = {cell for stage in stages for cell in stage.runner.recovered(sessions[0], may_pass)}
            if recovered:
                run.keep_failures([line for line in run.failures if line.cell not in recovered or line.stage])
                failed -= recovered
                stages = staged(recovered)
            judging = [] if execution.timed_only else [partial(expected_judging_s, run, plan)]
            progress.begin(len(plan.cells), sum(stage.scheduler.work for stage in stages), budget.deadline, *judging)
            _decode(stages, sessions, progress, budget)
        _say_if_changed(run.sessions[-1], progress)
    else:
        progress.begin(len(plan.cells), 0, budget.deadline)
    if execution.timed_only:
        return
    passes = UntimedPasses(run, plan, failed, budget.deadline, execution.peak_memory)
    if pool is not None:
        passes.execute(pool, progress.note, progress.show)
    else:
        passes.execute_in_child(progress.note, progress.show)


def _begin(workers: Sequence[Worker], run: Run, progress: Progress) -> list[WorkerSession]:
    if len(workers) > 1:
        progress.note(f"{len(workers)} workers are loading the models")
    sessions = [WorkerSession(worker, len(workers), run) for worker in workers]
    in_parallel(sessions, WorkerSession.begin)
    for note in kernels.notes(run.sessions[-1].kernels_off):
        progress.note(note)
    return sessions


def _decode(stages: Sequence[Stage], sessions: Sequence[WorkerSession], progress: Progress, budget: TimeBudget) -> None:
    """Decode stage after stage. The time of those to come is shared equally; time that is left goes to the first."""
    whole = list[bool]()
    for n, stage in enumerate(stages):
        to_come = sum(bool(other.scheduler.todo) for other in stages[n:])
        stage.scheduler.share_until = time.monotonic() + budget.left_s / max(to_come, 1)
        whole.append(stage.decode(sessions))
    for n, stage in enumerate(stages):
        stage.scheduler.share_until = math.inf
        if not (whole[n] or stage.scheduler.apart):  # apart, a round goes on in the servers in which it began
            whole[n] = stage.decode(sessions)
        stage.scheduler.leave_out_hopeless(sessions[0].warm, ended=True)
    for reason, n in sum((stage.runner.again for stage in stages), Counter[str]()).items():
        progress.note(f"the machine was disturbed: {reason}; {counted(n, 'block')} decoded again")
    if not all(whole):
        progress.note("time budget spent; `--resume` runs what is missing")


def _due(stages: Sequence[Stage]) -> list[Cell]:
    return [cell for stage in stages if stage.scheduler.todo for cell in stage.writer.live()]


def _say_what_fits(stages: Sequence[Stage], budget: TimeBudget, progress: Progress) -> None:
    """Say how many servers and blocks have time. Raises UserError if the decision of a race needs more."""
    if budget.seconds is not None and any(is_served(cell.engine) for cell in _due(stages)):
        parts = [stage.scheduler.part() for stage in stages if stage.scheduler.todo]
        if stages[0].scheduler.limited:
            budget.refuse_too_short(parts)
        progress.note(budget.described(parts))


def _say_if_busy(session: SessionRecord, progress: Progress) -> None:
    """Say that other programs use the cores, how threads wait then, and that those on the GPU are not seen."""
    if session.strangers_reason:
        progress.note(f"other programs on the GPU are not seen ({session.strangers_reason}); let none run there")
    others, passive = session.load_of_others or 0.0, machine.waits_passively(session.waiting, session.threads)
    if passive or others >= machine.BUSY_OTHERS:
        threads = f"; threads wait passively ({machine.PASSIVE})" if passive else ""
        progress.note(f"other programs use {percent(others, 0)} % of the cores{threads}")


def _say_if_changed(session: SessionRecord, progress: Progress) -> None:
    if (began := session.load_of_others) is None or (shares := machine.load_of_others(machine.LOOK_S)) is None:
        return
    if (began < machine.BUSY_OTHERS) != (shares[0] < machine.BUSY_OTHERS):
        now, then = (f"{percent(share, 0)} %" for share in (shares[0], began))
        progress.note(f"other programs use {now} of the cores now, and used {then} when this began; measure again")


def _failed_cells(run: Run, plan: Plan) -> tuple[set[str], set[str]]:
    """Return the cells that failed in an earlier session or when they were planned; store the latter's errors.

    Return also which of them failed for a cause that may have passed.
    """
    run.keep_failures(run.failures)  # without a torn line
    faults = {cell.cell: cell.fault for cell in plan.cells if cell.fault}
    decoding = [line for line in run.failures if line.stage is None]
    failed = {line.cell for line in decoding}
    run.add_failures([FailureLine(cell=cell, error=error) for cell, error in faults.items() if cell not in failed])
    return failed | faults.keys(), {line.cell for line in decoding if line.again} - faults.keys()


def _refuse_untrusted(run: Run, plan: Plan, stages: Sequence[Stage], execution: Execution) -> None:
    """Raise UserError for what the plan would use and this command does not name, or what another mtbench began."""
    used = {(cell.engine, option) for cell in plan.cells for option in cell.engine_options}
    refuse_engine_options(used, plan.request.engine_option, execution.engine_options)
    for cell in _due(stages):
        method = cell.built
        if isinstance(method, ExternalEngine) and method.server not in {None, *execution.servers}:
            raise UserError(
                f"the plan asks the server {method.server!r}, which this command does not name; if you trust it, add "
                f"`--server {shlex.quote(str(method.server))}`."
            )
        if run.sessions and (new := fields_of(METHODS[cell.method]).keys() - cell.options.keys()):
            raise UserError(
                f"{cell.cell} began before {cell.method} had the option {min(new)!r}, so later blocks may differ from "
                "earlier ones; resume it with the mtbench that began it, or start another run with `-o DIR`."
            )
