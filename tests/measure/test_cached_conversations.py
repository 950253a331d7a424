"""A killed replay of conversations resumes at the conversation, and counts nothing twice."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from stages import generate
from stored import stored_lines
from whole import Quiet, start

from mtbench.measure.block_runner import BlockRunner
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run

TURNS = 3
TALK = [message for n in range(TURNS) for message in ({"role": "user", "content": f"{n} + 4"}, {"role": "assistant"})]


@pytest.fixture
def request_(tmp_path: Path) -> RunRequest:
    file = tmp_path / "talk.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": [{"content": f"{n}", **m} for m in TALK]}) + "\n" for n in range(3))
    )
    suite = f"conversations:{file}"
    return RunRequest(suite=(suite,), family="tiny", method=("ar",), batch_size=(1,), rounds=2, max_new_tokens=4)


@pytest.mark.whole
@pytest.mark.parametrize("until", [TURNS, 4 * TURNS + 1])
def test_a_killed_replay_resumes_at_the_conversation(until: int, request_: RunRequest, tmp_path: Path) -> None:
    """Turns of a conversation that had not ended are decoded again: a new server has none of them in its cache."""
    run = start(tmp_path / "run", request_)
    with pytest.raises(KeyboardInterrupt):
        generate(run, Quiet(until=until), Execution(timed_only=True))
    resumed = Quiet()
    generate(run, resumed, Execution(timed_only=True))
    assert resumed.batches == 6 * TURNS - until // TURNS * TURNS
    [cell] = Run.open(run).plan.cells
    timed = Counter((line["round"], line["block"]) for line in stored_lines(run, f"timings/{cell.cell}.jsonl"))
    assert timed == Counter((round_, block) for round_ in (1, 2) for block in range(3 * TURNS))
    answered = Counter(line["item"] for line in stored_lines(run, f"generations/{cell.cell}.jsonl"))
    assert set(answered.values()) == {1}
    assert len(answered) == 3 * TURNS


@pytest.mark.whole
def test_a_time_budget_ends_between_turns(
    request_: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the end of a conversation, which is decoded anew."""
    run = start(tmp_path / "run", request_)

    def spent(runner: BlockRunner, *given: Any) -> bool:
        whole = write(runner, *given)
        runner.scheduler.budget.deadline = 0.0
        return whole

    write = BlockRunner.run_block
    monkeypatch.setattr(BlockRunner, "run_block", spent)
    progress = Quiet()
    generate(run, progress, Execution(timed_only=True))
    assert progress.batches == 1
