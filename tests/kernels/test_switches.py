"""What switches our kernels off: the environment variable, its values, and a check that fails."""

import pytest

from mtbench import kernels
from mtbench.errors import UserError


def test_the_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset or empty, it is on. Another value is refused in one line with the choices."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    assert kernels._switched_off() == []
    for value, reasons in (("", []), ("on", []), ("off", ["MTBENCH_KERNELS=off"])):
        monkeypatch.setenv(kernels.SWITCH, value)
        assert kernels._switched_off() == reasons
    monkeypatch.setenv(kernels.SWITCH, "0")
    with pytest.raises(UserError, match=r"^MTBENCH_KERNELS='0' is not allowed; .* to on or off, or unset it\.$"):
        kernels._switched_off()


def test_what_switches_our_kernels_off_is_forgotten_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user switched off stays off."""
    monkeypatch.setattr(kernels, "_off", [])
    with kernels.restored():
        kernels.switch_off("logits are wrong")
        assert kernels.off() == "logits are wrong"
    assert kernels.off() is None
    monkeypatch.setattr(kernels, "_off", ["MTBENCH_KERNELS=off"])
    with kernels.restored():
        kernels.switch_off("logits are wrong")
    assert kernels.off() == "MTBENCH_KERNELS=off"
