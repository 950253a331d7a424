"""Measure how many deliberate faults the tests find: `make mutants` changes the code in a fixed sample of places.

cosmic-ray makes the changes. `mutants.toml` says where, how, and which tests must fail. The name of a mutant is its
area, its operator and the text of the line it changes. The hash of the name decides whether the mutant is in the
sample. So two states of the project try the same mutants on the lines that they share, and `--against` compares these.
Each mutant runs the same tests with the same examples, in a fork of one process that has the libraries loaded. The file
is changed in place during its tests: do not use the checkout meanwhile.
"""

import argparse
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator, operator_names

CONFIG = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OPERATORS, SKIP = re.compile(f"core/({'|'.join(CONFIG['operators'])})"), re.compile("|".join(CONFIG["skip"]))
SAID = Path(tempfile.gettempdir()) / "mutants.log"  # what the last tests said


class Mutant(NamedTuple):
    name: str
    area: str
    file: str
    line: int
    function: str
    operator: str
    occurrence: int  # cosmic-ray's number of the place
    original: str
    mutated: str
    outcome: str = ""  # killed, timeout or survived
    seconds: float = 0.0


def sample(area: str, files: Sequence[str], share: float) -> Iterator[Mutant]:
    """Yield the mutants whose hash is in the lowest `share`, without those in signatures and on skipped lines."""
    met: Counter[str] = Counter()
    for file in files:
        source = Path(file).read_text()
        nodes, lines = list(ast_nodes(get_ast(source))), source.splitlines()
        for operator in filter(OPERATORS.fullmatch, operator_names()):
            change = get_operator(operator)()
            places = [(node, row) for node in nodes for (row, _), _ in change.mutation_positions(node)]
            for occurrence, (node, row) in enumerate(places):
                text = re.sub(r"\s+# .*", "", lines[row - 1]).strip()
                met[name := f"{area}: {operator.removeprefix('core/')}: {text}"] += 1
                name = f"{name} #{met[name]}"
                drawn = int.from_bytes(sha256(name.encode()).digest()) < share * 2**256
                if not drawn or SKIP.search(text) or node.parent.type == "parameters":
                    continue
                around, mutated = node.search_ancestor("funcdef"), mutate_code(source, change, occurrence)
                function = around.name.value if around else ""
                with suppress(SyntaxError):  # cosmic-ray does not know all of Python
                    compile(mutated, file, "exec")
                    old, new = (code.splitlines()[row - 1].strip() for code in (source, mutated))
                    yield Mutant(name, area, file, row, function, operator, occurrence, old, new)


def tried(stages: Sequence[Sequence[str]]) -> tuple[str, float]:
    """Run the tests on the code as it is. Return the outcome and the seconds."""
    outcome, began = "survived", time.perf_counter()
    for tests in stages:
        process = get_context("fork").Process(target=_test, args=(tests,))
        process.start()
        process.join(5 * CONFIG["timeout_s"])
        outcome = {0: "survived", None: "timeout", -signal.SIGXCPU: "timeout"}.get(process.exitcode, "killed")
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it started
        if outcome != "survived":
            break
    return outcome, round(time.perf_counter() - began, 1)


def _test(tests: Sequence[str]) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CONFIG["timeout_s"], resource.RLIM_INFINITY))
    for stream in (1, 2):
        os.dup2(os.open(SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def table(title: str, mutants: Sequence[Mutant]) -> str:
    lines = [f"\n{title:30} tried killed timeout survived noticed"]
    for area in [*dict.fromkeys(m.area for m in mutants), "all"]:
        of = Counter(m.outcome for m in mutants if area in (m.area, "all"))
        counts = f"{of.total():5} {of['killed']:6} {of['timeout']:7} {of['survived']:8}"
        lines.append(f"{area:30} {counts} {1 - of['survived'] / of.total():7.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="where the results go")
    parser.add_argument("--against", type=Path, help="results of another state, to compare with on common mutants")
    options = parser.parse_args()
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = (
        True,
        "1",
    )  # the bytecode of a mutant would outlive it
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    for library in CONFIG["libraries"]:
        import_module(library)
    found: list[Mutant] = []
    for area, how in CONFIG["areas"].items():
        outcome, whole = tried(how["tests"])
        assert outcome == "survived", f"the tests of {area} do not pass, see {SAID}"
        for mutant in sample(area, how["files"], how["share"]):
            with use_mutation(Path(mutant.file), get_operator(mutant.operator)(), mutant.occurrence):
                outcome, seconds = tried(how["tests"])
            found.append(mutant._replace(outcome=outcome, seconds=seconds))
            print(f"{outcome:8} {seconds:5} of {whole} s  {mutant.name}", flush=True)
            options.out.write_text(json.dumps([m._asdict() for m in found], indent=1, ensure_ascii=False))
    print(table("", found), "\nSurvivors:")
    for m in (m for m in found if m.outcome == "survived"):
        print(f"\n{m.file}:{m.line} {m.function}\n-{m.original}\n+{m.mutated}")
    if options.against:
        before = {m["name"]: Mutant(**m) for m in json.loads(options.against.read_text())}
        common = [m for m in found if m.name in before]
        print(table("on common mutants, there", [before[m.name] for m in common]), table("and here", common))


if __name__ == "__main__":
    main()
