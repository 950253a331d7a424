"""Readable names of arms: `mars:tau=0.95@mars/graph` is "MARS τ=0.95". The id stands below or beside it."""

import re
from collections.abc import Iterable, Mapping, Sequence

from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.results.format import ResultCell

ARM = re.compile(
    r"(?P<method>[^:@]+)(?::(?P<options>.*?))?@(?P<on>[^@/#]+)(?:/(?P<engine>[^@/#+]+)(?:\+.+?)?)?(?:#(?P<copy>\d+))?"
)
SYMBOLS = {"tau": "τ"}  # options that papers write as a symbol


def arm_names(cells: Iterable[ResultCell]) -> dict[str, str]:
    """Return the readable name of every arm: its method, its options, and what else distinguishes it from another arm.

    Arms with the same method and options differ in checkpoint, engine or copy; the name then has what differs. An arm
    in a serving engine has the engine's own name of its method, and options of the server that not all arms there have:
    "Prompt lookup (vLLM ngram, kv-cache-dtype=fp8)".
    """
    alike: dict[str, list[str]] = {}  # readable method and options -> arms
    names = {}
    of_arms = {cell.arm: cell for cell in cells}
    for arm, cell in of_arms.items():
        if inside := _in_engine(cell):
            there = [other.engine_options for other in of_arms.values() if other.engine == cell.engine]
            options = [option for option in cell.engine_options if not all(option in other for other in there)]
            names[arm] = f"{_method_and_options(arm)} ({', '.join([inside, *map(str, options)])})"
        else:
            alike.setdefault(_method_and_options(arm), []).append(arm)
    for words, arms in alike.items():
        for arm, rest in zip(arms, _differences(arms), strict=True):
            names[arm] = f"{words} ({rest})" if rest else words
    return names if len(set(names.values())) == len(names) else {arm: arm for arm in names}


def _in_engine(cell: ResultCell) -> str:
    """Return a serving engine's title and its own name of the cell's method; empty for another cell."""
    if cell.engine is None or cell.engine not in SERVING_ENGINES:
        return ""
    engine = SERVING_ENGINES[cell.engine]()
    setting = engine.setting(METHODS[cell.method](**cell.options), cell.checkpoints)
    return engine.title if isinstance(setting, str) else f"{engine.title} {setting.name}".strip()


def in_words(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the readable name of every arm in place of its id."""
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    ids = re.compile(rf"(?<![\w:@/-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w@/#-])")
    return ids.sub(lambda name: names[name[0]], text)


def _method_and_options(arm: str) -> str:
    parts = ARM.fullmatch(arm)
    if parts is None:
        return arm
    method = METHODS[parts["method"]].title if parts["method"] in METHODS else ""
    options = (parts["options"] or "").split(",") if parts["options"] else []
    return " ".join([method or parts["method"], *map(_option, options)])


def _option(given: str) -> str:
    """Return `name=value` in words; of a switch that is on, its name alone."""
    name, equals, value = given.partition("=")
    name = SYMBOLS.get(name, name.replace("_", " "))
    return name if value == "true" else f"{name}{equals}{value}"


def _differences(arms: Sequence[str]) -> list[str]:
    """Return for each of several arms what distinguishes it from the others; empty for a single arm."""
    if len(arms) == 1:
        return [""]
    parts = [ARM.fullmatch(arm) for arm in arms]
    differing = [
        name for name in ("on", "engine", "copy") if len({None if part is None else part[name] for part in parts}) > 1
    ]
    return [", ".join(part[name] or "1" for name in differing) if part else "" for part in parts]
