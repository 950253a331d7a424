"""A handful of kills and other faults of each kind; `make faults` makes a thousand (tools/faults.py)."""

import pytest
from fault_stages import STAGES, Lab
from faults import FAULTS, fault_trial, kill_trial

pytestmark = pytest.mark.whole

CHEAP = ("plan", "generate", "score", "report", "train")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("stage", CHEAP)
def test_a_killed_command_resumes_to_the_same_figures(lab: Lab, stage: str) -> None:
    """No figure is changed and no row is lost."""
    trial = kill_trial(lab, STAGES[stage], f"{stage}-killed", ["change"])
    assert (bool(trial.faults), trial.why) == (True, "")


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if "score" in fault.stages])
def test_a_fault_of_the_machine_ends_as_documented(lab: Lab, fault: str) -> None:
    """One line and an exit code; then the same command ends with the same figures."""
    assert fault_trial(lab, fault, STAGES["score"], f"score-{fault}").why == ""
