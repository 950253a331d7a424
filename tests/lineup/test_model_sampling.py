"""`--sampling model`: a plan has the settings of its checkpoint, as transformers reads them, or names what it lacks."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf_files import written
from small import save_small
from stages import begin_run, generate
from stored import stored_lines
from transformers import GenerationConfig
from whole import Quiet

from mtbench.errors import UserError
from mtbench.experiments.choose.plan import plan_of
from mtbench.experiments.choose.request import RaceRequest
from mtbench.experiments.load import planning
from mtbench.experiments.load.request import LoadRequest
from mtbench.lineup.model_sampling import DRAWN, UNLESS_NONE, UNLESS_ONE, with_sampling
from mtbench.lineup.planner import make_plan
from mtbench.models import families, gguf_writer
from mtbench.plan.plan import Plan, RunRequest
from mtbench.plan.request import Execution
from mtbench.sampling import GREEDY, Sampling

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SETTINGS: list[tuple[dict[str, Any] | None, Sampling]] = [
    (QWEN, Sampling(0.6, 20, 0.95, 0.0)),
    (QWEN | {"top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0, "num_beams": 1}, Sampling(0.6, 0, 0.95, 0.05)),
    ({"do_sample": True}, Sampling(1.0, 50, 1.0, 0.0)),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, GREEDY),
    ({"temperature": 0.6, "top_p": 0.9}, GREEDY),
    ({}, GREEDY),
    (None, GREEDY),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("checkpoints") / "ar", 1, initializer_range=0.2)


@pytest.fixture
def model(folder: Path) -> Callable[..., str]:
    """Give the checkpoint these generation settings; None: no file."""

    def settle(settings: dict[str, Any] | None, folder: Path = folder) -> str:
        (folder / "generation_config.json").unlink(missing_ok=True)
        if settings is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
        return str(folder)

    return settle


def asked(**options: Any) -> RunRequest:
    common = {"limit": 4, "batch_size": (2,), "rounds": 1, "max_new_tokens": 6, "device": "cpu"}
    return RunRequest(**{"method": ("ar", "prompt-lookup"), **common, "sampling_source": "model", **options})


@pytest.mark.parametrize(("settings", "expected"), SETTINGS, ids=str)
def test_a_plan_has_the_settings_of_its_checkpoint(
    settings: dict[str, Any] | None, expected: Sampling, model: Callable[..., str]
) -> None:
    """Greedy without `do_sample: true`, which the plan says; else transformers' values for what is not there."""
    plan = make_plan(asked(model=model(settings)))
    assert (plan.request.sampling, plan.request.sampling_source) == (expected, "model")
    assert any("--sampling model is greedy here" in said for said in plan.warnings()) == (expected == GREEDY)
    assert make_plan(asked(model=model(settings), sampling_source="own")).request.sampling == GREEDY


def test_an_option_that_is_given_wins_over_the_models(model: Callable[..., str]) -> None:
    """In a race and a load, too."""
    given: dict[str, Any] = {"model": model(QWEN), "top_p": 1.0, "temperature": 0.0001, "sampling_source": "model"}
    race = plan_of(RaceRequest(**given, method=("prompt-lookup",), batch_size=(1,), limit=8, device="cpu"))
    load = planning.plan(LoadRequest(**given, method=("ar",), requests=2, concurrency=(1,), device="cpu"))
    for request in (make_plan(asked(**given)).request, race.plan.request, load.request):
        assert request.sampling == Sampling(0.0001, 20, 1.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            QWEN | {"repetition_penalty": 1.1},
            r"has repetition_penalty=1.1, .* `--temperature 0.6 --top-p 0.95 --top-k 20",
        ),
        ({"no_repeat_ngram_size": 1}, "has no_repeat_ngram_size=1, which no arm applies"),
        (QWEN | {"num_beams": 4}, "has num_beams=4"),
        (QWEN | {"suppress_tokens": [7]}, r"has suppress_tokens=\[7\]"),
        (QWEN | {"top_k": 2.5}, "generation_config.json of '.*': top_k is 2.5"),
    ],
    ids=str,
)
def test_other_settings_that_change_tokens_are_refused_by_name(
    settings: dict[str, Any], said: str, model: Callable[..., str]
) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(asked(model=model(settings)))


def test_targets_with_other_settings_are_refused_with_both(model: Callable[..., str], tmp_path: Path) -> None:
    """What is given for both may differ between them, and a checkpoint that no arm decodes on."""
    ar, mars = model(QWEN), model(QWEN | {"temperature": 1.0}, save_small(tmp_path / "mars", 2))
    both = {"checkpoint": {"ar": ar, "mars": mars}, "method": ("ar", "mars")}
    with pytest.raises(UserError, match=r"ar': temperature 0.6, top-k 20, top-p 0.95; '.*mars': temperature 1, top-k"):
        make_plan(asked(**both))
    assert make_plan(asked(**both, temperature=0.5)).request.sampling == Sampling(0.5, 20, 0.95, 0.0)
    assert make_plan(asked(**both | {"method": ("ar",)})).request.sampling == Sampling(0.6, 20, 0.95, 0.0)


@pytest.mark.skipif(find_spec("gguf") is None, reason="the extra `gguf` is not installed")
def test_a_gguf_file_has_settings_of_its_own_or_says_that_it_has_none(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.gguf", tmp_path / "set.gguf"
    gguf_writer.write(Path(families.locate("embedded:tiny/draft")), plain, "float32")
    named = {"temp": 0.6, "top_p": 0.95, "min_p": 0.05}
    written(plain, file, keys={f"general.sampling.{key}": value for key, value in named.items()})
    assert with_sampling(asked(model=str(file))).sampling == Sampling(0.6, 0, 0.95, 0.05)
    written(plain, file, keys={"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.1})
    with pytest.raises(UserError, match=r"set.gguf' has repetition_penalty=1.1"):
        with_sampling(asked(model=str(file)))
    with pytest.raises(UserError, match=r"'.*plain.gguf' has no key general.sampling.temp; give `--temperature`"):
        with_sampling(asked(model=str(plain)))


def test_the_names_and_the_defaults_are_transformers() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    assert {name: defaults.get(name, 0.0) for name in DRAWN} == DRAWN
    assert all(defaults.get(name, 1) == 1 for name in UNLESS_ONE)
    assert not any(defaults.get(name) for name in UNLESS_NONE)
    others = {"presence_penalty", "frequency_penalty", "xtc_probability", "mirostat"}  # of vLLM and llama.cpp
    assert {*UNLESS_ONE, *UNLESS_NONE} - vars(GenerationConfig()).keys() == others


@pytest.mark.whole
def test_a_run_is_drawn_by_the_filters_and_a_resumed_one_stays_so(model: Callable[..., str], tmp_path: Path) -> None:
    """Tokens of an arm that claims to be lossless are those of plain decoding, and not those without filters."""

    def tokens(name: str, plan: Plan, *, stopped: bool = False) -> list[list[list[int]]]:
        run = begin_run(tmp_path / name, plan, ["mtbench", "run"])
        run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
        if stopped:
            generate(run, Quiet(), Execution(time_budget_s=0.0))
        generate(run, Quiet())
        lines = [stored_lines(run, f"generations/{cell.cell}.jsonl") for cell in plan.cells]
        return [[line["token_ids"] for line in sorted(of, key=lambda line: line["item"])] for of in lines]

    settings = {"do_sample": True, "temperature": 2.0, "top_k": 3, "top_p": 0.9}
    filtered = make_plan(asked(model=model(settings)))
    plain, drafted = tokens("filtered", filtered)
    assert plain == drafted
    assert tokens("resumed", make_plan(asked(model=model(settings))), stopped=True) == [plain, drafted]
    assert plain != tokens("hot", make_plan(asked(model=model(settings), top_k=0, top_p=1.0)))[0]
