"""lm-eval writes a file here, with its dummy model: the figures are those that it prints."""

import json
from pathlib import Path

import pytest

from mtbench.results.imports.registry import read_file

TASK = """task: sums
dataset_path: json
dataset_kwargs:
  data_files: {docs}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: [" 1", " 2", " 3"]
doc_to_target: 1
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 2.0
"""


@pytest.mark.whole
def test_a_file_that_lm_eval_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed version is read."""
    import datasets
    import huggingface_hub
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # reading a file asks the hub first
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps({"q": f"{n} + 1 ="}) + "\n" for n in range(8)))
    (tmp_path / "sums.yaml").write_text(TASK.format(docs=docs))
    tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
    written = lm_eval.simple_evaluate(
        model="dummy",
        tasks=["sums"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=10,
        evaluation_tracker=tracker,
    )
    tracker.save_results_aggregated(results=written, samples=written.pop("samples"))
    (of_results,) = (read_file(path)[0] for path in tmp_path.glob("out/*/results_*.json"))
    accuracy = written["results"]["sums"]["acc,none"]
    assert {figure.name: figure.value for figure in of_results.figures}["sums: acc,none"] == accuracy
