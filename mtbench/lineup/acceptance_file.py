"""Files of acceptance lengths: mean tokens per forward, the model's own token included, by the number of drafts K.

InferenceX publishes them as model → thinking_on | thinking_off → K → length (golden_al_distribution/; its reader,
runners/inject_synthetic_acceptance.py, takes model → K → length, too). A run's `acceptance.yaml` has a curve for each
method (mtbench/results/acceptance_curves.py).
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mtbench.decoding.arms import ENGINES, Arm
from mtbench.decoding.method import Method
from mtbench.errors import UserError, first_line
from mtbench.files import read_bytes
from mtbench.lineup.simulation import Acceptance, most_commits
from mtbench.options.classes import decoding_options
from mtbench.options.engine_options import with_options
from mtbench.options.texts import shown

OURS = "mtbench"  # key of what a run tells beside its curves


def curve_key(method: Method, engine: str) -> str:
    """Return the key of a method's curve behind its model: the options but the number of drafts, and the engine."""
    options = asdict(method)  # type: ignore[call-overload]  # methods are dataclasses by contract
    given = [name for name in decoding_options(type(method), options) if not _widens(method, name, options[name])]
    text = ",".join(f"{name}={shown(options[name])}" for name in given)
    return f"/{method.name}{text and ':'}{text}{'' if engine == ENGINES[0] else f'/{engine}'}"


def _widens(method: Method, name: str, value: Any) -> bool:
    """Return whether a forward may commit more if an option is larger by 1."""
    with suppress(UserError):  # the method has no such value
        return type(value) is int and most_commits(replace(method, **{name: value + 1})) > most_commits(method)  # type: ignore[type-var]
    return False


def mode_of(variables: Mapping[str, Any], otherwise: bool) -> str:
    """Return the mode that variables of a chat template choose; otherwise: whether answers think if none does."""
    names = ("enable_thinking", "thinking", "thinking_mode")
    thinks = next((variables[name] for name in names if name in variables), otherwise)
    return "thinking_on" if thinks in (True, "enabled") else "thinking_off"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        made: Any = yaml.constructor.BaseConstructor.construct_mapping(self, node, deep)  # merges may take any memory
        if len(made) < len(node.value):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} begins a mapping whose keys repeat")
        return made


@dataclass(frozen=True, kw_only=True)
class AcceptanceFile(Acceptance):
    """The lengths of a file. `source`: FILE, FILE#KEY or FILE#KEY/MODE."""

    curves: Mapping[str, Any]  # by KEY/MODE, or KEY where there are no modes
    mode: str  # of several, if none is named

    @classmethod
    def read(cls, text: str, variables: Mapping[str, Any]) -> "AcceptanceFile | None":
        """Return the file that a text names; None if it is no path. variables: of the template. Raises UserError."""
        path, curves = text.partition("#")[0], dict[str, Any]()
        if not path.endswith((".yaml", ".yml")) and not os.path.exists(path):
            return None
        try:
            stored = read_bytes(Path(path), largest=1 << 20)
            for key, curve in dict(yaml.load(stored, Loader=_Loader)).items():
                modes = isinstance(curve, dict) and any(isinstance(of_mode, dict) for of_mode in curve.values())
                curves |= {f"{key}/{mode}": of_mode for mode, of_mode in curve.items()} if modes else {str(key): curve}
        except Exception as error:  # values with tags may raise any
            fault = getattr(error, "strerror", None) or first_line(error)
            raise UserError(f"--simulate-acceptance {path!r} holds no lengths: {fault}.") from None
        return cls(text, [], curves=curves, mode=mode_of(variables, otherwise=True))

    def of_arm(self, arm: Arm, method: Method) -> Acceptance:
        """Return the length of an arm, with its place; of one that drafts nothing itself. Raises UserError for none."""
        (path, _, part), most = self.source.partition("#"), most_commits(method)
        if most == 1:
            return self
        every = [key for key in self.curves if key != OURS]
        keys = [part] if part in every else [key for key in every if f"{key}/".startswith(part and f"{part}/")]
        if OURS in self.curves and not part:
            engines = with_options(arm.engine, arm.settings), ENGINES[0]
            own = [[key for key in every if f"{curve_key(method, engine)}/thinking" in key] for engine in engines]
            keys = own[0] or own[1]
        keys = [key for key in keys if key.endswith(self.mode)] or keys
        others = ", ".join(keys or every)
        fault = f"has {len(keys) or 'no'} curves of {part or str(arm)!r}; add `#` and one of {others:.400}"
        if len(keys) == 1:
            curve = self.curves[keys[0]]
            length: Any = curve.get(most - 1) if isinstance(curve, dict) else curve
            if type(length) in (int, float) and 1 <= length <= most:
                return Acceptance(f"{path}#{keys[0]}, length={length:g}", [], float(length))
            fault = f"has no length from 1 to {most} for K={most - 1} ({method.name}): {keys[0]!r} has {curve!r:.200}"
        raise UserError(f"--simulate-acceptance {path!r} {fault}.")
