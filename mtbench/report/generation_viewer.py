"""What the report's generation viewer shows: every arm's answer to an item, token by token, as forwards committed them.

The idea is Figure 1 of the MARS paper (arXiv 2604.07023): shade each token by how many came out of its forward.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench.models.families import RANDOM, RANDOM_TOKENIZER, locate
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.plan import Plan

ITEMS = 40  # per suite and batch size
LETTERS = 1_500_000  # of all answers and prompts together, so that the page stays under some 3 MB
PROMPT_LETTERS = 6000
BYTES_OF_A_LETTER = 4  # most bytes UTF-8 takes, so most tokens one letter can be split into

Decode = Callable[[Sequence[int]], str]


def suite_name(spec: str) -> str:
    """A suite as a reader knows it: `prompts:mine.jsonl`, wherever that file was."""
    name, colon, rest = spec.partition(":")
    return f"{name}{colon}{Path(rest).name}"


class Texts:
    """Turns token ids into text with the checkpoints' own tokenizers, each loaded once, never from the network."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}

    def tokenizer(self, source: str) -> Any:
        """The tokenizer of a checkpoint, or None where it cannot be had."""
        if source not in self._tokenizers:
            try:
                from transformers import AutoTokenizer

                words = locate(RANDOM_TOKENIZER if source.startswith(RANDOM) else source)
                loaded = AutoTokenizer.from_pretrained(words, local_files_only=True, trust_remote_code=False)
            except Exception:  # a report is rebuilt anywhere, with or without the checkpoints
                loaded = None
            self._tokenizers[source] = loaded
        return self._tokenizers[source]

    def decode(self, source: str) -> Decode | None:
        tokenizer = self.tokenizer(source)
        if tokenizer is None:
            return None
        return lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def special(self, source: str) -> frozenset[int]:
        tokenizer = self.tokenizer(source)
        return frozenset() if tokenizer is None else frozenset(tokenizer.all_special_ids)


def split(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token; a letter made of several tokens stands with the last of them."""
    whole = decode(ids)
    alone = {i: decode([i]) for i in set(ids)}
    if "".join(alone[i] for i in ids) == whole:
        return [alone[i] for i in ids]
    pieces, start, shown = [], 0, 0  # ids[start:shown] are on the page, and give the next ones their context
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:shown]), decode(ids[start:end])
        unfinished = now.endswith("\ufffd") and end < len(ids) and end - shown < BYTES_OF_A_LETTER
        pieces.append("" if unfinished else now[len(before) :])
        if not unfinished:
            start, shown = shown, end
    return pieces


def viewer(run: RunDirectory, plan: Plan, results: Mapping[str, Any], numbers: Mapping[str, int]) -> Record:
    """The data behind the viewer, small enough to be part of the page. numbers: arm -> the number it carries."""
    texts = Texts()
    scores = run.read_json("scores.json") if run.has("scores.json") else {}
    cells = {cell["cell"]: cell for cell in results["cells"]}
    groups: list[Record] = []
    for group in plan.groups:
        of_group = [cells[name] for name in group.cells]
        lines = {name: {g["item"]: g for g in run.lines(f"generations/{name}.jsonl")} for name in group.cells}
        answered = [i for i in plan.suite(group.suite).items if any(i.item in of_cell for of_cell in lines.values())]
        items: list[Record] = []
        letters = 0
        for item in answered[:ITEMS]:
            answers = _answers(item.item, of_group, lines, scores, texts)
            read = next(of_cell[item.item]["prompt_ids"] for of_cell in lines.values() if item.item in of_cell)
            prompt = None if read is None else _prompt(read, texts.decode(_source(of_group[0])))
            items.append({"item": item.item, "prompt": prompt, "answers": answers})
            letters += len(json.dumps(items[-1], ensure_ascii=False))
            if letters > LETTERS / len(plan.groups):
                break
        if items:
            arms = [{"arm": cell["arm"], "number": numbers[cell["arm"]]} for cell in of_group]
            run_of = {"suite": suite_name(group.suite), "batch_size": group.batch_size, "batching": group.batching}
            groups.append({**run_of, "arms": arms, "items": items, "of": len(answered)})
    whole = any(a and a["pieces"] is None for g in groups for i in g["items"] for a in i["answers"])
    note = "A tokenizer could not be loaded where this page was made: those texts are shown whole, without shades."
    turns = any(item.follows is not None for suite in plan.suites for item in suite.items)
    whose = "A later turn is shown as the first arm read it; every arm goes on from its own answers."
    return {"groups": groups, "notes": [note] * whole + [whose] * turns}


def _answers(
    item: str,
    cells: Sequence[Mapping[str, Any]],
    lines: Mapping[str, Mapping[str, Record]],
    scores: Mapping[str, Mapping[str, float]],
    texts: Texts,
) -> list[Record | None]:
    """What each arm made of one item; None where it has no answer."""
    answers: list[Record | None] = []
    for cell in cells:
        line = lines[cell["cell"]].get(item)
        if line is None:
            answers.append(None)
            continue
        answer = _answer(cell, line, scores.get(cell["cell"], {}).get(item), texts)
        baseline = _baseline(cell, cells)
        other = lines[baseline["cell"]].get(item) if baseline else None
        if baseline and other and other["token_ids"] is not None and line["token_ids"] is not None:
            ours, theirs = line["token_ids"], other["token_ids"]
            answer["against"] = {"arm": baseline["arm"], "same": None if ours == theirs else _same(ours, theirs)}
        answers.append(answer)
    return answers


def _answer(cell: Mapping[str, Any], line: Mapping[str, Any], score: float | None, texts: Texts) -> Record:
    source = _source(cell)
    decode, ids = texts.decode(source), line["token_ids"]
    pieces = None if decode is None or ids is None else [_sound(p) for p in split(ids, decode)]
    special = [] if pieces is None else [i for i, token in enumerate(ids) if token in texts.special(source)]
    cut = None
    if pieces is not None and line["finish_reason"] == "stop":
        cut = _cut(pieces, special, len(line["text"]))
    return {
        "pieces": pieces,
        "text": _sound(line["text"]) if pieces is None else None,
        "commits": line["commits"],
        "forwards": line["forwards"],
        "tokens": None if ids is None else len(ids),
        "special": special,
        "cut": cut,
        "finish": line["finish_reason"],
        "score": score,
        "against": None,
    }


def _cut(pieces: Sequence[str], special: Sequence[int], letters: int) -> list[int] | None:
    """[token, letter] where the stored text ends and a stop string begins."""
    for index, piece in enumerate(pieces):
        if index in special:
            continue
        if letters < len(piece):
            return [index, letters]
        letters -= len(piece)
    return None


def _baseline(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell this one is compared with, on its own checkpoint if there is one; else the one it is held to."""
    names = [entry["baseline"] for entry in cell["speedup"] if not entry.get("includes_engine")]
    if not names and cell["lossless"]:
        names = [cell["lossless"]["against"]]
    compared = sorted((c for c in cells if c["arm"] in names), key=lambda c: bool(c["on"] != cell["on"]))
    return compared[0] if compared else None


def _source(cell: Mapping[str, Any]) -> str:
    """Whose tokenizer the cell's ids are in."""
    return str(cell["checkpoints"][cell["on"]])


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens agree before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _prompt(ids: Sequence[int], decode: Decode | None) -> str | None:
    if decode is None:
        return None
    text = _sound(decode(ids))
    return text if len(text) <= PROMPT_LETTERS else f"… {text[-PROMPT_LETTERS:]}"


def _sound(text: str) -> str:
    """Text that can be written as UTF-8."""
    return text.encode(errors="replace").decode()
