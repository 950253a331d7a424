"""lm-eval: results_*.json and samples_*.jsonl of version 0.4 (EleutherAI/lm-evaluation-harness, lm_eval/loggers).

results_*.json holds the figures that lm-eval prints. A line of samples holds one item under one filter; the file names
neither the task nor a version. The hashes of document, prompt and target name an item.
"""

import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedFigure
from mtbench.results.imports.importer import (
    Content,
    Found,
    Importer,
    Meaning,
    figure,
    has,
    member,
    number,
    optional_text,
    other_version,
    settings,
    shown,
    text,
    within,
)

SERIES = "0.4"
HASHES = ("doc_hash", "prompt_hash", "target_hash")
SETTINGS = ("batch_size", "limit", "gen_kwargs", "random_seed", "fewshot_seed", "device")


def _recognises_results(documents: Sequence[Any]) -> bool:
    first = documents[0]
    return has(first, "results", "versions", "config") and isinstance(first["results"], dict)


def _read_results(content: Content) -> list[Found]:
    document, where = content.documents[0], content.where
    version = document.get("lm_eval_version")
    if not isinstance(version, str) or version.split(".")[:2] != SERIES.split("."):
        raise other_version(where, "lm_eval_version", version, f"versions {SERIES}.x")
    figures = [found for task in document["results"] for found in _task(document, task, where)]
    if not figures:
        raise UserError(f"{where}: results holds no metric, so there is nothing to import.")
    config = document.get("config")
    return [
        Found(
            figures=figures,
            version=text(version),
            model=optional_text(document.get("model_name")),
            settings=settings(document, ("model_source", "fewshot_as_multiturn")) | settings(config, SETTINGS),
        )
    ]


def _task(document: Mapping[str, Any], task: str, where: str) -> Iterator[ImportedFigure]:
    """Yield the metrics of a task or group: their keys are `metric,filter`. "N/A" stands for an unknown error."""
    conditions = []
    for key, words in (("versions", "version {}"), ("n-shot", "{}-shot")):
        if (value := within(document, key, task)) is not None:
            conditions.append(words.format(text(value)))
    if has(count := within(document, "n-samples", task), "effective"):
        conditions.append(f"{text(count['effective'])} items")
    about = ", ".join([text(task), *conditions])
    for key, value in member(document["results"], task, dict, where).items():
        metric, comma, name_of_filter = key.partition(",")
        if comma and value != "N/A":
            spread = "_stderr" in metric
            what = "Standard error of the metric" if spread else "lm-eval's metric"
            name = metric.replace("_stderr", "") if spread else metric
            definition = f"{what} `{text(name)}` after the filter `{text(name_of_filter)}` on {about}."
            meaning = Meaning(f"lm-eval: {about}: {text(key)}", "as the metric", definition)
            yield figure(meaning, f"{text(task)}: {text(key)}", value, where)


def _recognises_samples(documents: Sequence[Any]) -> bool:
    return has(documents[0], "doc_id", "doc_hash", "filtered_resps")


def _read_samples(content: Content) -> list[Found]:
    by_filter: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for line, sample in enumerate(content.documents, start=1):
        where = f"{content.where}, line {line}"
        if not isinstance(sample, dict):
            raise UserError(f"{where}: it is {shown(sample)}; it must be an object.")
        by_filter.setdefault(text(sample.get("filter", "none")), []).append((where, sample))
    found = [_samples(name, lines) for name, lines in by_filter.items()]
    if not any(result.figures for result in found):
        raise UserError(f"{content.where}: no metric has one number per item, so there is nothing to import.")
    return [result for result in found if result.figures]


def _samples(name_of_filter: str, lines: Sequence[tuple[str, Mapping[str, Any]]]) -> Found:
    values: dict[str, list[float]] = {}
    items: dict[tuple[str, ...], str] = {}
    for where, sample in lines:
        key = tuple(text(member(sample, name, str, where)) for name in HASHES)
        if key in items:
            raise UserError(f"{where}: its document, prompt and target are those of {items[key].rpartition(', ')[2]}.")
        items[key] = where
        for metric in member(sample, "metrics", list, where):
            value = sample.get(metric) if isinstance(metric, str) else None
            if isinstance(value, int | float):  # other metrics need more than one number, such as a perplexity
                values.setdefault(text(metric), []).append(number(float(value), str(metric), where))
    digest = hashlib.sha256("".join(sorted("".join(key) for key in items)).encode()).hexdigest()[:8]
    figures = []
    for metric, of_items in values.items():
        about = f"`{metric}` after the filter `{name_of_filter}`, over the {len(of_items)} items {digest}"
        meaning = Meaning(f"lm-eval samples: {about}", "as the metric", f"Mean of {about}, with equal weight.")
        mean = statistics.fmean(of_items)
        figures.append(figure(meaning, f"{metric}, mean of samples", mean, lines[0][0]))
    return Found(figures=figures, part=f"filter {name_of_filter}", settings={"items": str(len(items))})


RESULTS = Importer("lm-eval results_*.json (0.4)", "lm-eval", _recognises_results, _read_results)
SAMPLES = Importer("lm-eval samples_*.jsonl", "lm-eval", _recognises_samples, _read_samples)
