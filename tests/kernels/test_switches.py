"""The environment variables that switch our kernels and their dependent launch off: their values, and who asks."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mtbench import kernels
from mtbench.errors import UserError

HOPPER = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that starts kernels early; nothing is switched off."""
    kernels._starts_early.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "_dependent_off", [])
    yield
    kernels._starts_early.cache_clear()


@pytest.mark.parametrize("name", [kernels.SWITCH, kernels.DEPENDENT_SWITCH])
def test_a_switch_is_on_or_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset or empty, it is on. Another value is refused in one line with the choices."""
    monkeypatch.delenv(name, raising=False)
    assert kernels._switched_off(name) == []
    for value, reasons in (("", []), ("on", []), ("off", [f"{name}=off"])):
        monkeypatch.setenv(name, value)
        assert kernels._switched_off(name) == reasons
    monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=rf"^{name}='0' is not allowed; .* to on or off, or unset it\.$"):
        kernels._switched_off(name)


def test_our_kernels_ask_before_each_launch(hopper: None) -> None:
    """Within one process they may be launched either way, as `mtbench doctor` compares them."""
    triton_products = pytest.importorskip("mtbench.kernels.triton_products")
    asks = (kernels.dependent_launch, triton_products.dependent_launch)
    assert all(ask(HOPPER) for ask in asks)
    with kernels.without_dependent_launch():
        assert not any(ask(HOPPER) for ask in asks)
        assert kernels.dependent_launch_off() is not None
    assert all(ask(HOPPER) for ask in asks)
    assert not kernels.dependent_launch(torch.device("cpu"))


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


COMPILED = "from mtbench.models.fused_decoder import COMPILE; print(COMPILE['triton.enable_pdl'])"


@pytest.mark.whole
def test_compiled_code_and_commands_obey_the_environment() -> None:
    """torch.compile gets no option for an early start; a command with a wrong value ends with one line."""

    def ran(value: str, *words: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {kernels.DEPENDENT_SWITCH: value}
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=variables)

    assert [ran(value, "-c", COMPILED).stdout for value in ("on", "off")] == ["True\n", "False\n"]
    refused = ran("never", "-m", "mtbench", "doctor")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: MTBENCH_DEPENDENT_LAUNCH='never' is not allowed")
    assert refused.stderr.count("\n") == 1
