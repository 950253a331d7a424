"""lm-eval: results_*.json of version 0.4 (EleutherAI/lm-evaluation-harness, lm_eval/loggers): what lm-eval prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedFigure
from mtbench.results.imports.importer import (
    Found,
    Importer,
    Meaning,
    figure,
    has,
    member,
    optional_text,
    other_version,
    settings,
    text,
    within,
)

SERIES = "0.4"
SETTINGS = ("batch_size", "limit", "gen_kwargs", "random_seed", "fewshot_seed", "device")


def _recognises(documents: Sequence[Any]) -> bool:
    first = documents[0]
    return has(first, "results", "versions", "config") and isinstance(first["results"], dict)


def _read(where: str, documents: Sequence[Any]) -> list[Found]:
    document = documents[0]
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


IMPORTER = Importer("lm-eval results_*.json (0.4)", "lm-eval", _recognises, _read)
