"""The passes after the timed one: re-scoring, energy and peak memory. The comparison uses none of their times."""

import contextlib
import multiprocessing
from collections.abc import Callable, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mtbench.measure import cache_probe, energy, peak_memory
from mtbench.measure.lossless_check import Rescoring
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.workers import interrupts_blocked
from mtbench.models.auto import resolve_device
from mtbench.plan.plan import Plan, RunRequest
from mtbench.plan.run import Run
from mtbench.plugins import InChild


@dataclass(frozen=True, slots=True)
class UntimedPasses:
    """The run, as the passes need it."""

    run: Run
    plan: Plan
    failed: Set[str]  # cells without answers
    deadline: float  # by time.monotonic
    peak_memory_on_cpu: bool  # one process per cell: minutes on a real model

    def execute(self, pool: ModelPool, note: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Run the passes on the models of `pool`, as far as the deadline allows. show: receives the current step."""
        run, plan, failed = self.run, self.plan, set(self.failed)
        rescoring = Rescoring(run, plan, pool, note, show, self.deadline)
        answered = [cell for cell in plan.cells if cell.cell not in failed]
        rescoring.begin(answered)
        for cell in answered:
            rescoring.check(cell)
            cache_probe.judge(rescoring, cell)
        del rescoring  # its models
        left_out = failed.union(line.cell for line in run.left if line.lost or line.unraced)
        show("measuring energy and peak memory")
        energy.measure(run, plan, pool, left_out, note, self.deadline)
        if pool.device != "cpu" or self.peak_memory_on_cpu:
            peak_memory.measure(run.directory, plan, pool, left_out, note, self.deadline)
        pool.clear()

    def execute_in_child(self, note: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Run the passes in a child process: the process that distributes work must not use a GPU itself."""
        decoded_on = self.run.sessions[0].device if self.run.sessions else None
        device = "cpu" if decoded_on == "cpu" else resolve_device("auto")
        if decoded_on != device:
            note(f"decoded on {decoded_on}, but this machine has {device}: no re-scoring, no measurement of memory")
            return
        request = self.plan.request.changed(device=device)
        context = multiprocessing.get_context("spawn")
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=InChild(_execute_in_child), args=(self, request, send))
        with interrupts_blocked():
            child.start()
        send.close()
        try:
            with contextlib.suppress(EOFError):
                while True:
                    is_note, text = receive.recv()
                    (note if is_note else show)(text)
        except BaseException:
            child.kill()
            raise
        finally:
            child.join()
        if child.exitcode:
            note(f"the untimed passes crashed (exit code {child.exitcode}); `--resume` runs them again")


def _execute_in_child(passes: UntimedPasses, request: RunRequest, send: Connection) -> None:
    passes.execute(
        ModelPool(request), note=lambda text: send.send((True, text)), show=lambda text: send.send((False, text))
    )
