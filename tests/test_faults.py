"""One kill and one full disk of `make faults` (tools/faults.py), which makes a thousand."""

from pathlib import Path

import pytest
from fault_stages import STAGES, Lab
from faults import fault_trial, kill_trial


@pytest.mark.whole
def test_a_killed_stage_and_one_without_disk_resume_to_the_same_figures(tmp_path: Path) -> None:
    lab, stage = Lab(tmp_path), STAGES["generate"]
    killed = kill_trial(lab, stage, "killed", ["change"])
    assert (bool(killed.faults), killed.why) == (True, "")
    assert fault_trial(lab, "full disk", stage, "full").why == ""
