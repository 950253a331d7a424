"""`mtbench audit`: a fault that is planted in answers is named, and honest differences are not called faults."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import AR, decoded, honest_run, judge_runner, planted, told
from torch import Tensor

import mtbench
from mtbench.experiments.audit import trials
from mtbench.models.runner import ModelRunner
from mtbench.runs.formats import GenerationLine


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest_run(tmp_path_factory.mktemp("audit") / "honest")


@pytest.fixture(scope="module")
def judge() -> ModelRunner:
    return judge_runner()


def audited(a: object, b: object, tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Return audit.json of two outputs."""
    found = mtbench.audit(str(a), str(b), out=tmp_path / "audit", device="cpu", **given)
    assert found.record == json.loads((tmp_path / "audit/audit.json").read_text())
    return dict(found.record)


def named(record: dict[str, Any]) -> set[str]:
    return {finding["name"] for finding in record["findings"]}


Make = Callable[[ModelRunner, Sequence[int], Sequence[int]], list[int]]  # of the judge, a prompt, the honest answer


def plain(make: Make) -> Callable[..., Any]:
    """A fault of plain decoding: the tokens that `make` gives."""

    def plant(judge: ModelRunner) -> dict[str, Any]:
        def change(line: GenerationLine, _: int) -> dict[str, Any]:
            assert line.prompt_ids is not None
            return told(make(judge, line.prompt_ids, line.token_ids), judge)

        return {f"{AR}.b4": change}

    return plant


def penalised(logits: Tensor, tokens: Sequence[int]) -> int:
    seen = torch.tensor(list(tokens), dtype=torch.long)
    logits = logits.clone()
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
    return int(logits.argmax())


def sampled_by(seed: int) -> Callable[[Tensor, Sequence[int]], int]:
    generator = torch.Generator().manual_seed(seed)
    return lambda logits, _: int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def without_layer(judge: ModelRunner, prompt: Sequence[int], _: Sequence[int]) -> list[int]:
    with trials._without_layer(2)(judge.model):
        return decoded(judge, prompt, 64)


def in_eight_bits(judge: ModelRunner, prompt: Sequence[int], _: Sequence[int]) -> list[int]:
    with trials._eight_bits(judge.model):
        return decoded(judge, prompt, 64)


PLAIN: dict[str, tuple[str, Make]] = {
    "budget one short": ("stop/budget", lambda _, __, tokens: list(tokens[:-1])),
    "end ignored": ("stop/budget", lambda judge, prompt, _: decoded(judge, prompt, 64, _endless(judge))),
    "penalty": ("sampling", lambda judge, prompt, _: decoded(judge, prompt, 64, _with_prompt(prompt))),
    "sampled": ("sampling", lambda judge, prompt, _: decoded(judge, prompt, 64, sampled_by(sum(prompt)))),
    "bfloat16 logits": (
        "rounding",
        lambda judge, prompt, _: decoded(judge, prompt, 64, lambda x, __: int(x.bfloat16().argmax())),
    ),
    "layer left out": ("weights", without_layer),
    "8 bits": ("weights", in_eight_bits),
    "rope one off": (
        "cache/position",
        lambda judge, prompt, _: decoded(judge, prompt, 64, change=trials._shifted(1, [])),
    ),
    "system prompt of another": (
        "cache/position",
        lambda judge, prompt, _: decoded(judge, prompt, 64, change=trials._unread(3, [])),
    ),
}


def _endless(judge: ModelRunner) -> Callable[[Tensor, Sequence[int]], int]:
    ends = torch.tensor(judge.checkpoint.end_ids)
    return lambda logits, _: int(logits.index_fill(0, ends, float("-inf")).argmax())


def _with_prompt(prompt: Sequence[int]) -> Callable[[Tensor, Sequence[int]], int]:
    return lambda logits, tokens: penalised(logits, [*prompt, *tokens])


@pytest.mark.parametrize("fault", PLAIN)
def test_fault_of_plain_decoding(fault: str, honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    expected, make = PLAIN[fault]
    run = planted(honest, tmp_path / "b", plain(make)(judge))
    record = audited(f"{honest}:{AR}.b4", f"{run}:{AR}.b4", tmp_path)
    print(record["sentence"], record["findings"][0]["evidence"], *record["trials"], sep="\n")
    assert named(record) == {expected}, record["sentence"]
