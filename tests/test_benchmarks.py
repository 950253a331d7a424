"""The scripts for a GPU, each run once on a CPU on stand-ins, as `--dry-run` does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import forking

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STEPS = ["operations", "equality", "run", "static-4", "refill-16", "hf-dynamic", "invariant", "prefill", "prefill-64"]

pytestmark = pytest.mark.whole

WITHOUT = """
import runpy, sys
sys.argv.pop(0)
missing = ("lm_eval", "datasets")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ImportError(f"{name} is not on the machine with the GPU")

sys.meta_path.insert(0, Missing())
for name in list(sys.modules):  # those of the tests; what needs them is imported again
    if name.partition(".")[0] in (*missing, "mtbench"):
        del sys.modules[name]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def dry(*command: str) -> str:
    """Run a script; return what it printed."""
    with forking():
        done = subprocess.run([sys.executable, *command, "--dry-run"], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr
    return done.stdout


def test_every_kind_of_step_of_the_gpu_script_ends_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lm-eval and datasets. Each step says one line; each required figure is a number of its step."""
    text = dry(
        "-c", WITHOUT, str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path), "--only", *STEPS[:1], "--only", *STEPS[1:]
    )
    found: dict[str, Any] = {step: json.loads((tmp_path / f"{step}.json").read_text()) for step in STEPS}
    assert {step: found[step]["ended"] for step in STEPS} == dict.fromkeys(STEPS), text
    assert all(any(line.startswith(f"{step} ") for line in text.splitlines()) for step in STEPS)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_parts.figures import BARS

    measured = {(figure["what"], step): figure["value"] for step in STEPS for figure in found[step]["figures"]}
    assert all(measured[what, bar.step] is not None for what, bar in BARS.items() if bar.step in STEPS)
    assert measured["kernels against float64, worst relative error", "operations"] < 1e-5
    assert measured["cells that differ or fail in float32", "equality"] == 0


@pytest.mark.slow
def test_steps_that_are_asked_for_end_with_their_figures(tmp_path: Path) -> None:
    """Of a gate: the slower build has the same tokens and counts by the same decoder, so that its times decide."""
    steps = ["real", "gate"]
    text = dry(str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path), "--only", *steps)
    found: dict[str, Any] = {step: json.loads((tmp_path / f"{step}.json").read_text()) for step in steps}
    assert {step: found[step]["ended"] for step in steps} == dict.fromkeys(steps), text
    figures = [figure for step in steps for figure in found[step]["figures"]]
    assert len(figures) == 6
    assert all(figure["value"] is not None for figure in figures)
    for head in ("itself", "slower"):
        gate = json.loads((tmp_path / f"gate/gate-{head}/gate.json").read_text())
        assert {finding["kind"] for finding in gate["findings"]} <= {"environment", "slower", "undecided"}
        assert gate["same_build"] == (head == "itself")
        sides = (
            (tmp_path / f"gate/gate-{head}/exact/{side}/environment.json").read_text() for side in ("base", "head")
        )
        [layers, again] = (json.loads(side)["sessions"][0]["layers"] for side in sides)
        assert layers == again


@pytest.mark.slow
def test_a_mars_checkpoint_is_trained_and_measured_at_every_threshold(tmp_path: Path) -> None:
    text = dry(str(BENCHMARKS / "train_mars.py"), "--out", str(tmp_path))
    cells = json.loads((tmp_path / "train_mars.json").read_text())["cells"]
    arms = ["ar@ar", "ar@mars", "mars@mars", "mars:tau=0.95@mars", "mars:tau=0.9@mars", "mars:tau=0.8@mars"]
    names = [(cell["batch_size"], cell["arm"].removesuffix("/graph")) for cell in cells]
    assert names == [(size, arm) for size in (1, 8, 16) for arm in arms]
    assert {cell["status"] for cell in cells} == {"ok"}
    assert {cell["accuracy"]["n"] for cell in cells} == {4}
    assert "No decision yet at batch size" in text


@pytest.mark.slow
def test_trainings_of_equal_cost_are_measured_for_every_seed_and_skipped_when_they_are_complete(tmp_path: Path) -> None:
    command = (str(BENCHMARKS / "equal_cost.py"), "--out", str(tmp_path), "--only", "ar,mars,self_distill")
    text = dry(*command)
    assert dry(*command) in text
    found = json.loads((tmp_path / "equal_cost.json").read_text())
    names = [(arm["objective"], arm["tau"]) for arm in found["arms"]]
    assert names == [("base", None), ("ar", None), *((o, tau) for o in ("mars", "self_distill") for tau in (1.0, 0.5))]
    assert {len(arm["tokens_per_forward"]["by_seed"]) for arm in found["arms"]} == {2}
    assert all(arm["speed_at_batch_1"]["items"] for arm in found["arms"][1:])
    assert [t["teacher_forwards"] > 0 for t in found["trainings"]] == [False, False, True] * 2
    assert {row["rival"] for row in found["mars_less_rivals"]} == {"self_distill"}
    assert (tmp_path / "frontier.svg").exists()


def test_intervals_over_items_and_over_seeds_are_apart_and_a_threshold_is_judged_on_other_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from equal_cost import ACCURACY, choices, estimate, ratio

    items, even = 400, np.arange(400) % 2 == 0
    drawn = np.random.default_rng(0).multinomial(items, [1 / items] * items, 200)
    weights = np.vstack((np.ones(items), drawn), dtype=float)
    ones = np.ones((3, items))
    by_item = ratio(np.stack([100 * ones * even, ones]), weights, ACCURACY)
    by_seed = ratio(np.stack([[[40.0], [50.0], [60.0]] * ones, ones]), weights, ACCURACY)
    of_items, of_seeds = estimate(by_item), estimate(by_seed)
    assert of_items["items"] == pytest.approx([50 - 1.96 * 2.5, 50 + 1.96 * 2.5], abs=0.7)
    assert of_items["seeds"] == pytest.approx([50, 50])
    assert of_seeds["items"] == pytest.approx([50, 50])
    assert of_seeds["seeds"] == pytest.approx([50 - 24.84, 50 + 24.84], abs=0.01)  # t(2) = 4.303

    right = np.stack([100 * ones, ones, ones, ones])
    fast = np.stack([100 * ones * even, ones, 2 * ones, ones])
    arms: Any = {("base", None): right, ("mars", 1.0): right, ("mars", 0.5): fast}
    assert {(row["tau"], row["over_base"]["value"]) for row in choices(arms, weights, {})} == {(0.5, -100)}
