"""Acceptance that collapses is named with its likely cause, by evidence of the results and of the files."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from made_records import cell_data, generation_line, result_cell, speedup
from safetensors.torch import save_file
from scripted_engine import Scripted
from stages import assemble, generate
from whole import Quiet

from mtbench.clients.serving_engine import Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.lineup.planner import begin_run, make_plan
from mtbench.options.engine_options import EngineOption
from mtbench.plan.plan import RunRequest
from mtbench.plan.prompts import RAW_PROMPTS
from mtbench.plan.request import Execution
from mtbench.report.main_table import notes_of
from mtbench.report.summary import warnings
from mtbench.results import collapse
from mtbench.results.decision import recommend
from mtbench.results.figure_formats import Collapse
from mtbench.results.samples import CellData

UNKNOWN = "compare with `mtbench run --engine graph --engine scripted`"


def drafting(length: float, engine: str = "scripted", *, method: str = "speculative", **given: Any) -> CellData:
    """Eight blocks with answers of 60 tokens, about `length` of them per forward after the prefill."""
    lines = [
        generation_line(
            item=f"a/{n}/0", block=n, token_ids=[1] * (60 + n % 2), forwards=1 + round((59 + n % 2) / length)
        )
        for n in range(8)
    ]
    options = {"draft": "draft"} if method == "speculative" else {}
    return cell_data(
        lines, [], **{"arm": f"{method}@ar/{engine}", "method": method, "engine": engine, "options": options, **given}
    )


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """An engine with a scripted server, of which options say how many drafts of an answer are accepted."""

    class Mine(Scripted):
        title = "Scripted"
        methods: ClassVar[Table] = {"ar": lambda *_: Setting(""), "speculative": lambda *_: Setting("draft")}

        def __init__(self) -> None:
            super().__init__({})

        def launch(self, python: Path, serving: Any, port: int) -> list[str]:
            words = dict(zip(serving.options[::2], serving.options[1::2], strict=True))
            accepted = next(iter(words.values()), "accepts=0")
            self.script = {"says": [9], "accepted": int(accepted.partition("=")[2])}
            return super().launch(python, serving, port)

        @classmethod
        def python(cls) -> Path:
            return Path(sys.executable)

    SERVING_ENGINES.register("scripted")(Mine)
    yield
    SERVING_ENGINES.forget(__name__)


FP8: dict[str, Any] = {
    "engine_options": ["kv-cache-dtype=fp8"],
    "other_tokens": ["kv-cache-dtype=fp8"],
    "claims": "lossy",
}
Q4: dict[str, Any] = {"other_tokens": ["spec-draft-type-k=q4_0"]}
FP16: dict[str, Any] = {"engine_options": ["dtype=float16"], "other_tokens": ["dtype=float16"], "claims": "lossy"}


@pytest.mark.parametrize(
    ("cell", "twin", "cause", "text"),
    [
        (
            drafting(1.0),
            None,
            "unknown",
            f"its drafts are hardly ever accepted (1.00 tokens per forward); cause unknown: {UNKNOWN}",
        ),
        (
            drafting(1.6),
            drafting(2.4, "graph"),
            "unknown",
            "accepted less than those of speculative@ar/graph (1.59 and 2.33",
        ),
        (drafting(1.6, **FP8), drafting(2.4), "cache type", "likely cause: cache type: kv-cache-dtype=fp8"),
        (drafting(1.6, **FP16), drafting(2.4), "dtype", "likely cause: dtype: dtype=float16"),
        (
            drafting(1.6, **Q4),
            drafting(2.4, "graph"),
            "engine option",
            "likely cause: engine option: spec-draft-type-k=q4_0",
        ),
        (drafting(1.0, flags=[RAW_PROMPTS]), None, "template", "likely cause: template: raw prompts: the"),
        (drafting(1.0, "graph"), None, "unknown", "cause unknown: check that the draft was trained for this target"),
    ],
)
def test_a_collapse_is_named_with_its_likely_cause(
    cell: CellData, twin: CellData | None, cause: str, text: str
) -> None:
    """At any level where drafts are of no use; else against the same drafts elsewhere, by the interval of the ratio."""
    found = collapse.find(cell, [cell, *([twin] if twin else [])], "float32")
    assert found is not None
    assert found.cause == cause
    assert text in found.text


@pytest.mark.parametrize(
    ("cell", "twin"),
    [
        (drafting(1.3), None),
        (drafting(2.3), drafting(2.4, "graph")),
        (drafting(1.0, method="prompt-lookup"), None),
        (drafting(1.0, method="prompt-lookup"), drafting(1.6, "graph", method="prompt-lookup")),
        (drafting(1.6), drafting(2.4, "graph", options={"draft": "draft", "ahead": 9})),
        (drafting(1.0, method="ar"), None),
        (drafting(1.0, "graph", method="mars", options={"tau": 0.5}), None),
    ],
    ids=[
        "some are accepted",
        "engines count otherwise",
        "copies",
        "copies elsewhere",
        "other drafts",
        "plain",
        "lossy",
    ],
)
def test_what_is_no_collapse(cell: CellData, twin: CellData | None) -> None:
    """Each engine copies others from the text, which are often rejected. Unmasking by a threshold may be slow."""
    assert collapse.find(cell, [cell, *([twin] if twin else [])], "float32") is None


def test_the_nearest_arm_tells_the_option() -> None:
    """Of two changed options, that one which an arm with the other option does not have."""
    both = ["cache=q8_0", "spec=q4_0"]
    arms = [drafting(2.4), drafting(2.4, other_tokens=both[:1], engine_options=both[:1])]
    cell = drafting(1.6, other_tokens=both, engine_options=both)
    assert (found := collapse.find(cell, [*arms, cell], "float32")) is not None
    assert found.text.endswith("likely cause: engine option: spec=q4_0")


def test_an_engine_may_hide_its_forwards() -> None:
    hidden = drafting(1.0)
    hidden.lines["a/0/0"] = generation_line(item="a/0/0", block=0)
    assert collapse.find(hidden, [hidden], "float32") is None


@pytest.mark.parametrize(
    ("config", "head", "dtype", "cause", "words"),
    [
        (
            {"torch_dtype": "bfloat16"},
            True,
            "float16",
            "dtype",
            "the draft is stored in bfloat16, and decodes in float16",
        ),
        (
            {"speculators_config": {"verifier": {"name_or_path": "a/Other"}}},
            True,
            "float32",
            "draft of another target",
            "names a/Other",
        ),
        (
            {"tie_word_embeddings": False},
            False,
            "float32",
            "head not tied",
            "tie_word_embeddings=false, and its files no head",
        ),
        (
            {"tie_word_embeddings": True},
            True,
            "float32",
            "head not tied",
            "tie_word_embeddings=true, and its files a head",
        ),
        ({"tie_word_embeddings": False, "dtype": "bfloat16"}, True, "bfloat16", "unknown", UNKNOWN),
        ({"vocab_size": 48}, True, "float32", "unknown", UNKNOWN),
        ({"vocab_size": "many", "speculators_config": 7, "dtype": []}, True, "float32", "unknown", UNKNOWN),
        (None, False, "float16", "unknown", UNKNOWN),
    ],
)
def test_the_files_of_a_draft_are_evidence(
    config: dict[str, Any] | None, head: bool, dtype: str, cause: str, words: str, tmp_path: Path
) -> None:
    """A draft that is not on this machine gives none."""
    for name, settings in (("target", {"vocab_size": 40}), ("draft", config)):
        if settings is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(settings))
            weights = {"lm_head.weight": torch.zeros(1)} if head else {"x": torch.zeros(1)}
            save_file(weights, tmp_path / name / "model.safetensors")
    cell = drafting(1.0, checkpoints={"ar": str(tmp_path / "target"), "draft": str(tmp_path / "draft")})
    assert (found := collapse.find(cell, [cell], dtype)) is not None
    assert found.cause == cause
    assert words in found.text


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ([], [None, "unknown"]),
        (["scripted:kv-cache-dtype=accepts=9|accepts=1"], [None, None, None, "cache type"]),
        (["scripted:dtype=accepts=9|accepts=1"], [None, None, None, "dtype"]),
    ],
)
def test_a_servers_collapse_is_in_the_results_and_on_the_page(
    options: list[str], causes: list[str | None], tmp_path: Path
) -> None:
    """Nothing accepted, and less accepted with another cache or in another dtype."""
    asked = RunRequest(
        suite=["arithmetic"],
        method=["ar", "speculative:ahead=3"],
        engine=["scripted"],
        engine_option=[*map(EngineOption.read, options)],
        limit=8,
        batch_size=[1],
        rounds=1,
        max_new_tokens=16,
    )
    run = begin_run(tmp_path / "run", make_plan(asked), ["mtbench"])
    generate(run, Quiet(), Execution(engine_options=frozenset(map(EngineOption.read, options))))
    cells = assemble(run).cells
    assert [cell.collapse and cell.collapse.cause for cell in cells] == causes
    assert "collapse" in (dumped := json.loads((run.path / "results.json").read_text())["cells"][-1]), dumped
    last = cells[-1]
    assert last.collapse is not None
    assert ("flag", f"{last.collapse.text}.") in notes_of(last)
    assert f"{last.arm}: {last.collapse.text}." in warnings(cells)


def test_a_race_names_a_collapse_before_it_keeps_plain_decoding() -> None:
    slow = speedup(value=0.8, ci_low=0.7, ci_high=0.9, verdict="slower")
    found = Collapse(cause="unknown", text="its drafts are hardly ever accepted")
    arm = result_cell(arm="speculative@ar/graph", method="speculative", speedup=[slow], collapse=found)
    [decided] = recommend([result_cell(arm="ar@ar/graph", reference=True, speedup=[]), arm], max_loss=2)
    assert decided.word == "plain"
    assert (
        "look first at speculative@ar/graph: its drafts are hardly ever accepted. As it is, keep plain" in decided.text
    )
