"""Files of acceptance lengths: mean tokens per forward, the model's own token included, by the number of drafts K.

- As InferenceX publishes them (golden_al_distribution/): model → thinking_on | thinking_off → K → length. Its reader
  (runners/inject_synthetic_acceptance.py) also takes model → K → length, and a list of such mappings of K.
- `acceptance.yaml` of a run (mtbench/results/acceptance_curves.py): the same, a curve for each method.
- A recipe: a variable that forces a server's length; TensorRT-LLM's leaves out the model's own token. Tested on files.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mtbench.decoding.arms import ENGINES
from mtbench.decoding.method import Method
from mtbench.errors import UserError, first_line
from mtbench.files import read_bytes
from mtbench.options.classes import decoding_options
from mtbench.options.texts import shown

OURS = "mtbench"  # key of what a run tells beside its curves
MODES = {False: "thinking_off", True: "thinking_on"}
FORCED = {"SGLANG_SIMULATE_ACC_LEN": 0, "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": 1}  # tokens that it leaves out
RECIPE = re.compile(rf"^[^#\n]*?\b({'|'.join(FORCED)})['\"]?\s*[:=]\s*['\"]?([\d.]+)", re.MULTILINE)
LARGEST = 1 << 20  # bytes


def most_commits(method: Method) -> int:
    """Return the most tokens that one forward pass commits; 1 for an external engine, which does not expose it."""
    return 1 if method.outside else method.variants[-1].window().commits


def curve_key(method: Method, engine: str) -> str:
    """Return the key of a method's curve behind its model: the options but the number of drafts, and the engine."""
    options = asdict(method)  # type: ignore[call-overload]  # methods are dataclasses by contract
    given = [name for name in decoding_options(type(method), options) if not _counts_drafts(method, name)]
    text = ",".join(f"{name}={shown(options[name])}" for name in given)
    return f"/{method.name}{text and ':'}{text}{'' if engine == ENGINES[0] else f'/{engine}'}"


def _counts_drafts(method: Method, name: str) -> bool:
    """Return whether a forward may commit more if an option is larger by 1."""
    value = getattr(method, name)
    with suppress(UserError):  # the method has no such value
        return type(value) is int and most_commits(replace(method, **{name: value + 1})) > most_commits(method)  # type: ignore[type-var]
    return False


def thinks(variables: Mapping[str, Any]) -> bool | None:
    """Return whether variables of a chat template switch thinking on; None: they do not say."""
    names = ("enable_thinking", "thinking", "thinking_mode")
    return next((variables[name] in (True, "enabled") for name in names if name in variables), None)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values. Of repeated keys the last would hide the others; merges may take memory without bounds."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if len({*keys, "<<"}) <= len(keys):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} begins a mapping whose keys repeat or merge")
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class AcceptanceFile:
    """The curves of a file, by KEY/MODE, or KEY without a mode."""

    path: str
    part: str  # KEY or KEY/MODE that was asked for; empty: none
    curves: Mapping[str, Any]
    ours: bool
    variables: Mapping[str, Any]  # of the chat template

    @classmethod
    def read(cls, text: str, variables: Mapping[str, Any]) -> "AcceptanceFile | None":
        """Return the file of FILE, FILE#KEY or FILE#KEY/MODE; None if the text is no path. Raises UserError."""
        path, _, part = text.partition("#")
        if not path.endswith((".yaml", ".yml")) and not os.path.exists(path):
            return None
        curves = dict[str, Any]()
        try:
            stored = read_bytes(Path(path), LARGEST)
            forced = {f"{name}={value}": float(value) + FORCED[name] for name, value in RECIPE.findall(stored.decode())}
            found = dict(forced or yaml.load(stored, Loader=_Loader))
            for key, curve in found.items():
                if isinstance(curve, list) and key != OURS:
                    curve = dict(item for entry in curve for item in entry.items())
                modes = isinstance(curve, dict) and any(isinstance(of_mode, dict) for of_mode in curve.values())
                curves |= {f"{key}/{mode}": of_mode for mode, of_mode in curve.items()} if modes else {str(key): curve}
        except Exception as error:  # values with tags may raise any
            fault = f"cannot be read as `MODEL: MODE: K: LENGTH`: {first_line(error)}"
            raise UserError(f"--simulate-acceptance {path!r} {fault}.") from None
        return cls(path, part, curves, curves.pop(OURS, None) is not None, variables)

    def length(self, method: Method, engine: str) -> tuple[str, float]:
        """Return where the acceptance length of a method that drafts stands, and the length.

        engine: with its settings. Raises UserError if there is none, or several.
        """
        most, keys = most_commits(method), [key for key in self.curves if f"{key}/".startswith(f"{self.part}/")]
        if not self.part:
            ends = [f"{curve_key(method, of)}/thinking" for of in (engine, ENGINES[0])] if self.ours else [""]
            keys = next(filter(None, ([key for key in self.curves if end in key] for end in ends)), [])
        if len(keys) > 1:
            keys = [key for key in keys if key.endswith(MODES[thinks(self.variables) is not False])] or keys
        fault = f"has {len(keys) or 'no'} curves of {self.part or method.name!r}; add `#` and one of {[*self.curves]}"
        if len(keys) == 1:
            curve = self.curves[keys[0]]
            length: Any = curve.get(most - 1) if isinstance(curve, dict) else curve
            if type(length) in (int, float) and 1 <= length <= most:
                return f"{self.path}#{keys[0]}", float(length)
            fault = f"has no length from 1 to {most} for K={most - 1} ({method.name}): {keys[0]!r} has {curve!r:.200}"
        raise UserError(f"--simulate-acceptance {self.path!r} {fault}.")
