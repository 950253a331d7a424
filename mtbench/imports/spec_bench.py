"""Spec-Bench: a JSONL of answers (hemingkx/Spec-Bench, evaluation/eval.py), with the figures of evaluation/speed.py.

speed.py prints them for each task and for all questions; it reads the first choice of a question. The file records no
version: an answer file without `accept_lengths`, as forks of FastChat write it, is refused.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.imports.importer import Content, Found, Importer, Meaning, figure, has, member, number, numbers, text
from mtbench.imports.meanings import MEAN_STEP

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEED = Meaning(
    "spec-bench: Tokens per second",
    "tokens/s",
    "New tokens / wall time of each question, all of its turns, averaged over questions with equal weight.",
)


def _recognises(documents: Sequence[Any]) -> bool:
    first = documents[0]
    choices = first.get("choices") if has(first, "question_id", "choices") else None
    return isinstance(choices, list) and bool(choices) and has(choices[0], "wall_time", "new_tokens")


def _read(content: Content) -> list[Found]:
    tasks: dict[str, list[tuple[float, list[float]]]] = {"overall": []}
    models: dict[str, None] = {}
    for line, answer in enumerate(content.documents, start=1):
        where = f"{content.where}, line {line}"
        category = text(member(answer, "category", str, where))
        models[text(answer.get("model_id", "unknown"))] = None
        measured = _question(answer, where)
        tasks["overall"].append(measured)
        tasks.setdefault("mt_bench" if category in MT_BENCH else category, []).append(measured)
    if len(models) > 1:
        raise UserError(f"{content.where}: answers of several models ({', '.join(models)}); give a file for each.")
    return [_result(task, questions, next(iter(models)), content.where) for task, questions in tasks.items()]


def _question(answer: Mapping[str, Any], where: str) -> tuple[float, list[float]]:
    """Return a question's tokens per second and its accept lengths."""
    choices = member(answer, "choices", list, where)
    choice = choices[0] if choices else {}
    lengths = numbers(member(choice, "accept_lengths", list, where), "accept_lengths", where)
    tokens, wall_s = (
        sum(numbers(member(choice, name, list, where), name, where)) for name in ("new_tokens", "wall_time")
    )
    if wall_s <= 0:
        raise UserError(f"{where}: wall_time is {wall_s:g} in total; it must be positive.")
    return number(tokens / wall_s, "tokens per second", where), lengths


def _result(task: str, questions: Sequence[tuple[float, list[float]]], model: str, where: str) -> Found:
    lengths = [length for _, of_question in questions for length in of_question]
    speed = statistics.fmean(rate for rate, _ in questions)
    figures = [figure(MEAN_STEP, "#Mean accepted tokens", statistics.fmean(lengths), where)] if lengths else []
    return Found(
        figures=[*figures, figure(SPEED, "Tokens per second", speed, where)],
        model=model,
        part=task,
        settings={"questions": str(len(questions))},
    )


IMPORTER = Importer("Spec-Bench JSONL", "Spec-Bench", _recognises, _read)
