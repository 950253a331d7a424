"""Spec-Bench: 480 questions of six kinds, 80 each, the yardstick of speculative decoding. Speed and agreement only.

Paper: "Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of Speculative Decoding", Xia et
al., arXiv 2401.07851. Data: github.com/hemingkx/Spec-Bench (Apache-2.0; the questions are drawn from MT-bench, WMT14
DE-EN, CNN/DailyMail, Natural Questions, GSM8K and DPR, whose own terms apply).

    mtbench run --suite spec-bench                              # fetched from its authors once, then kept
    mtbench run --suite spec-bench --offline --data-dir DIR     # DIR/spec_bench/question.jsonl

As there: greedy, up to 1024 new tokens, and MT-bench's eight subjects are one kind. Unlike there, only the first turn
is asked (MT-bench has a second, whose prompt would be each arm's own first answer), by the checkpoint's chat template.
An item's task is its kind, so that kinds are batched and can be told apart.
"""

import hashlib
import http.client
import json
import os
import urllib.request
from itertools import chain, zip_longest
from pathlib import Path
from typing import ClassVar, NamedTuple

from mtbench.errors import UserError, first_line
from mtbench.registry import SUITES
from mtbench.suite import Prompt, Source, Suite, Template

FILE = "spec_bench/question.jsonl"
KIND = dict.fromkeys(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "mt_bench"
)  # the file's category -> the paper's, where they differ
PATIENCE_S = 60


class Question(NamedTuple):
    kind: str
    id: str
    text: str


@SUITES.register("spec-bench")
class SpecBench(Suite):
    max_new_tokens = 1024
    metric = None

    # The file as its authors have it, by content.
    url: ClassVar[str] = (
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
        "/data/spec_bench/question.jsonl"
    )
    sha256: ClassVar[str] = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"

    def __init__(self, rest: str, source: Source) -> None:
        if rest:
            raise UserError(f"suite 'spec-bench' takes nothing behind a colon, not {rest!r}")
        data = self._stored(source.data_dir) if source.data_dir else self._kept() or self._fetched(source.offline)
        self.questions = _in_turn(data)
        self.task = {
            "name": "spec-bench",
            "num_fewshot": 0,
            "chat_template": True,
            "turns": "first",
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """One question of each kind, then the next of each, and so on: a limit cuts all kinds alike."""
        return [
            Prompt(item=f"{q.kind}/{q.id}/0", text=template([{"role": "user", "content": q.text}]))
            for q in self.questions[:limit]
        ]

    def _stored(self, data_dir: Path) -> bytes:
        try:
            return (data_dir / FILE).read_bytes()
        except OSError as error:
            raise UserError(
                f"suite 'spec-bench': cannot read {data_dir / FILE}: {error.strerror}; --data-dir DIR holds {FILE}"
            ) from None

    def _kept(self) -> bytes | None:
        """What was fetched before, if it is still that."""
        try:
            data = _cache().read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == self.sha256 else None

    def _fetched(self, offline: bool) -> bytes:
        wayout = f"pass --data-dir DIR with {FILE} in it (from github.com/hemingkx/Spec-Bench)"
        if offline:
            raise UserError(f"suite 'spec-bench': no usable data in the cache; {wayout}, or run once without --offline")
        try:
            with urllib.request.urlopen(self.url, timeout=PATIENCE_S) as answer:
                data: bytes = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"suite 'spec-bench': cannot fetch {self.url} ({first_line(error)}); {wayout}") from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise UserError(f"suite 'spec-bench': {self.url} is not the file it was; {wayout}")
        partial = _cache().with_suffix(f".{os.getpid()}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(_cache())
        except OSError:  # it is fetched again the next time
            partial.unlink(missing_ok=True)
        return data


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtbench" / "data" / FILE


def _in_turn(data: bytes) -> list[Question]:
    """The questions, kind by kind in turn; within MT-bench the subjects take turns too."""
    categories: dict[str, list[Question]] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            category, question = _read(number, line)
            categories.setdefault(category, []).append(question)
    kinds: dict[str, list[Question]] = {}
    for question in _deal(categories):
        kinds.setdefault(question.kind, []).append(question)
    if not kinds:
        raise UserError(f"suite 'spec-bench': {FILE} has no questions")
    return _deal(kinds)


def _deal(piles: dict[str, list[Question]]) -> list[Question]:
    """One of each pile, then the next of each, until all are empty."""
    return [question for question in chain.from_iterable(zip_longest(*piles.values())) if question is not None]


def _read(number: int, line: bytes) -> tuple[str, Question]:
    """The category and the first turn of a line like {"question_id": 81, "category": "writing", "turns": ["…"]}."""
    try:
        entry = json.loads(line)
        category, name, text = entry["category"], str(entry["question_id"]), entry["turns"][0]
        if "/" in f"{category}{name}" or not text.strip():
            raise ValueError("a category, id or turn that is none")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"suite 'spec-bench': {FILE}, line {number} is no question of Spec-Bench ({reason})") from None
    return category, Question(KIND.get(category, category), name, text)
