"""The interface to lm-evaluation-harness: its tasks write the prompts, its filters and metrics score the answers.

Source: github.com/EleutherAI/lm-evaluation-harness, tested with 0.4.13. mtbench builds a task's requests twice: before
generation for the prompts, and after it to attach the stored answers.
Importing `lm_eval` takes a second, and only planning and scoring need it, so functions import it.
"""

import io
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib.metadata import version
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation import dataset_files
from mtbench.evaluation.by_value import Case
from mtbench.evaluation.suite import Messages, Prompt, Reading, Source, Suite, Template
from mtbench.programs import network

# lm-eval's own seeds. Its published runs show these few-shot examples in this order; ours do too, for every run seed.
FEWSHOT_SEED = 1234
SEED = 0
INVALID = "[invalid]"  # what its filters return where they find nothing


class HarnessSuite(Suite):
    """A suite of lm-eval tasks. Most suite files set the attributes below and nothing else.

    A suite of several tasks also sets `subtasks`: the short names of `tasks`, in the same order.
    """

    tasks: ClassVar[Mapping[str, Mapping[str, str]]]  # lm-eval's task name -> split -> file below --data-dir
    group: ClassVar[str] = ""  # lm-eval's name for the tasks together; the mean of a group is over items
    folder: ClassVar[str]  # folder of the tasks below lm_eval/tasks; indexing all of lm_eval/tasks takes ten seconds
    field: ClassVar[str | None] = None  # key of the rows in a JSON file; None: the file is a list of rows
    num_fewshot: ClassVar[int] = 0
    stop: ClassVar[tuple[str, ...] | None] = None  # strings that end an answer; None: those of the task
    chat_template: ClassVar[bool] = True  # False: the prompt is a text to continue, without a chat template
    config: ClassVar[Mapping[str, Any]] = {}  # entries of lm-eval's task configuration to replace, such as doc_to_text
    filter: ClassVar[str]  # report the score of this filter of the task
    nothing: ClassVar[str] = "no text"  # why an answer is unread in which the filter finds nothing
    find: Callable[[str], object] | None = None  # the result of an answer, None if it has none; None: the filter tells
    same_values: Callable[[Sequence[Case]], Sequence[bool]] | None = None  # whether answers equal references
    own_rule: ClassVar[bool] = False  # the reading by value is the score: the owner has no rule for these prompts
    metric: str  # report this metric of the task

    def __init__(self, variant: str, source: Source) -> None:
        selected = self._select_tasks(variant, source.subtasks)
        self._tasks = self._load_tasks(selected, source)  # task name in item ids -> lm-eval's task
        self.task = {
            "name": self.group or ",".join(selected.values()),
            "version": ",".join(sorted({str(task.VERSION) for task in self._tasks.values()})),
            "num_fewshot": self.num_fewshot,
            "chat_template": self.chat_template,
            "fewshot_as_multiturn": self.chat_template,  # few-shot examples are chat turns, lm-eval's default for chat
            "fewshot_seed": FEWSHOT_SEED,
            "metric": self.metric,
            "filter": "by value" if self.own_rule else self.filter,
            "harness": f"lm-eval {version('lm-eval')}",
        }
        if "doc_to_text" in self.config:
            self.task["wording"] = self.config["doc_to_text"]
        if self.group:
            self.task |= {"mean": "micro", "subtasks": list(selected)}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Interleave the tasks: the first item of each, then the second of each, and so on."""
        how: dict[str, Any] = {"num_fewshot": self.num_fewshot} | self._chat_settings(template)
        with lm_eval_environment():
            requests = [
                (place, doc, name, request)
                for name, task in self._tasks.items()
                for place, (doc, request) in enumerate(
                    self._build_requests(task, self._selected_docs(name, limit), limit, **how)
                )
            ]
        requests.sort(key=lambda entry: entry[0])
        return [
            Prompt(item=_item(name, doc), text=request.args[0], stop=_stop_strings(request.args[1]))
            for _, doc, name, request in requests
        ]

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        cases = self._score_answers(answers)
        values = self.same_values([*cases.values()]) if self.same_values else [None] * len(cases)
        return {item: self._reading(case, value) for (item, case), value in zip(cases.items(), values, strict=True)}

    def _reading(self, case: Case, same: bool | None) -> Reading:
        by_value = None if same is None else float(same)
        score, by_value = (by_value, None) if self.own_rule else (case.score, by_value)
        if score is None:
            return Reading(0.0, "lm-eval raised an error", by_value)
        found = self.find(case.text) if self.find else str(case.found).strip(" \t\r\n.,$")
        read = found not in (None, "", INVALID)
        return Reading(score, None if score or read else self.nothing, by_value)

    def _score_answers(self, answers: Mapping[str, str]) -> dict[str, Case]:
        documents: dict[str, list[int]] = {}  # of each task
        for item in answers:
            name, place, _ = item.split("/")
            documents.setdefault(name, []).append(int(place))
        cases = dict[str, Case]()
        with lm_eval_environment():
            for name, docs in documents.items():
                task = self._tasks[name]
                requests = {_item(name, doc): request for doc, request in self._build_requests(task, sorted(docs))}
                for item, request in requests.items():
                    request.resps = [answers[item]]
                self._filter(task, list(requests.values()))
                cases |= {item: self._score(task, request) for item, request in requests.items()}
        return cases

    def _filter(self, task: Any, requests: list[Any]) -> None:
        """Filter all answers at once: a filter may first make a table, which takes a quarter of a second."""
        (apply,) = (ensemble.apply for ensemble in task._filters if ensemble.name == self.filter)
        try:
            apply(requests)
        except Exception:  # of one answer; the others are filtered all the same
            for request in requests:
                with suppress(Exception):
                    apply([request])

    def _score(self, task: Any, request: Any) -> Case:
        random.seed(SEED)  # some metrics draw random numbers; a score must not depend on the items before it
        found = score = None
        with suppress(Exception):  # of one answer; the others have their scores
            found = request.filtered_resps[self.filter]
            score = float(task.process_results(request.doc, [found])[self.metric])
        return Case(request.doc, str(task.doc_to_target(request.doc)), request.resps[0], found, score)

    def _select_tasks(self, variant: str, subtasks: Sequence[str]) -> dict[str, str]:
        """Return task name in item ids -> lm-eval's task name. Raise UserError for an unknown `variant`."""
        if variant:
            raise UserError(f"suite {self.name!r} has no variants, so {variant!r} is not allowed behind the colon")
        tasks = dict(zip(self.subtasks or self.tasks, self.tasks, strict=True))
        return {name: tasks[name] for name in subtasks or tasks}

    def _selected_docs(self, name: str, limit: int | None) -> list[int] | None:
        """Return the documents of a task to use, in order; None: the first `limit`. A suite may choose others."""
        return None

    def _chat_settings(self, template: Template) -> dict[str, Any]:
        """Return the arguments with which lm-eval renders a complete prompt by this chat template; {}: without one."""

        def render(messages: Messages, add_generation_prompt: bool = True) -> str:
            if add_generation_prompt:
                return template(messages)
            return f"{template(messages[:-1])}{messages[-1]['content']}"  # the task writes the beginning of the answer

        chat = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": render}
        return chat if self.chat_template else {}

    def _build_requests(
        self, task: Any, docs: list[int] | None, limit: int | None = None, num_fewshot: int = 0, **chat: Any
    ) -> list[tuple[int, Any]]:
        """Return (document, lm-eval's request) pairs of `docs`, in order; if None, of the first `limit` documents."""
        if docs == []:
            return []  # lm-eval takes an empty selection for "all"
        task.set_config("num_fewshot", num_fewshot)
        task.set_fewshot_seed(FEWSHOT_SEED)  # restart the draw at every pass: item k always gets draw k
        task.build_all_requests(limit=limit if docs is None else None, samples=docs, **chat)
        if docs is None:
            return [(request.doc_id, request) for request in task.instances]
        in_file_order = sorted(docs)  # as lm-eval takes them
        request_of = {in_file_order[request.doc_id]: request for request in task.instances}
        return [(doc, request_of[doc]) for doc in docs]

    # --- Loading --------------------------------------------------------------------------------------------------

    def _load_tasks(self, selected: Mapping[str, str], source: Source) -> dict[str, Any]:
        """Load lm-eval's tasks and their data. Raise UserError if the data are missing or unusable."""
        files = {file for task in selected.values() for file in self.tasks[task].values()}
        paths = {file: self._locate(source.data_dir, file) for file in sorted(files)} if source.data_dir else {}
        if source.offline:
            network.go_offline()
        elif not source.data_dir:
            network.hub_refusal()  # a client that cannot connect would try for half a minute
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager

        try:
            # In memory: lm-eval would cache processed documents on disk, and later runs would use those of the first.
            with lm_eval_environment(), patch.object(datasets.config, "IN_MEMORY_MAX_SIZE", 2**40):
                data = {file: self._read(path, file) for file, path in paths.items()}
                # lm-eval merges a group's members with the tasks it knows by name; it does not merge a single task.
                members: list[dict[str, Any]] = [{"task": task, **self.config} for task in selected.values()]
                if data:
                    for member in members:
                        splits = {split: data[file] for split, file in self.tasks[member["task"]].items()}
                        member["custom_dataset"] = lambda splits=splits, **_: splits
                index = Path(lm_eval.__file__).parent / "tasks" / self.folder
                manager = TaskManager(include_defaults=False, include_path=index)
                loaded = manager.load({"group": "mtbench", "task": members})["tasks"]
        except UserError:
            raise
        except Exception as error:  # datasets, pyarrow, jinja and the hub's client raise different classes
            raise self._data_error(sorted(files), source, error) from error
        tasks = {name: loaded[task] for name, task in selected.items()}
        for task in tasks.values():
            self._configure(task)
        return tasks

    def _configure(self, task: Any) -> None:
        """Apply this suite's settings to a loaded task. Raise UserError if the task does not generate text."""
        if task.OUTPUT_TYPE != "generate_until":
            raise UserError(
                f"suite {self.name!r}: lm-eval's {task.config.task} is of type {task.OUTPUT_TYPE}, which compares "
                "likelihoods and generates nothing to speed up; use a task of type generate_until"
            )
        if self.stop is not None:
            task.set_config("generation_kwargs", {"until": list(self.stop)}, update=True)
        if process := task.config.process_docs:
            # lm-eval would process the documents at every access, which takes seconds and, where it shuffles choices,
            # gives a new order each time. lm-eval's own runs cache the first result.
            with lm_eval_environment():
                config = task.config
                splits = {config.training_split, config.validation_split, config.test_split} & {*task.dataset}
                task.dataset = {**task.dataset, **{split: process(task.dataset[split]) for split in sorted(splits)}}
                config.process_docs = None

    def _locate(self, data_dir: Path, file: str) -> Path:
        """Return the path of a file below the data folder, packed (.gz) or not. Raise UserError if it is missing."""
        path = data_dir / file
        packed = path.with_name(path.name + ".gz")
        for candidate in (path, packed):
            if candidate.is_file():
                return candidate
        raise UserError(f"suite {self.name!r}: no file {path} (nor {packed.name}); --data-dir DIR must hold {file}")

    def _read(self, path: Path, file: str) -> Any:
        return dataset_files.load(path, self.field)

    def _data_error(self, files: Sequence[str], source: Source, error: Exception) -> UserError:
        required = " and ".join(files if len(files) < 3 else (files[0], f"{len(files) - 1} more"))
        if not (source.data_dir or source.offline) and (reason := network.hub_refusal()):
            return UserError(
                f"suite {self.name!r}: the hub cannot be reached ({reason}), and its cache has no usable data; without "
                f"a network pass `--data-dir DIR` with {required} in it, or `--suite prompts:FILE`."
            )
        cause = error.__cause__ or error  # datasets only reports "an error occurred"; its cause has the reason
        where, retry = "on the hub", ""
        if source.data_dir:
            where = f"below {source.data_dir}"
        elif source.offline:
            where, retry = "in the cache", ", or run once without --offline"
        why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        return UserError(
            f"suite {self.name!r}: no usable data {where} ({why}); pass --data-dir DIR with {required}{retry}"
        )


class TrainableSuite(HarnessSuite):
    """A suite whose tasks have a training split that holds no item."""

    def examples(self, count: int | None, seed: int) -> list[Messages]:
        """Return training documents in the form of few-shot examples, in file order; several tasks are interleaved."""
        tasks = list(self._tasks.values())
        if any(task.config.training_split not in task.dataset for task in tasks):
            raise UserError(f"suite {self.name!r} has no training split in its data")
        rounds = zip_longest(*(task.training_docs() for task in tasks))
        pairs = ((task, doc) for docs in rounds for task, doc in zip(tasks, docs, strict=True) if doc is not None)
        with lm_eval_environment():
            return [_example(task, doc) for task, doc in islice(pairs, count)]


def _example(task: Any, doc: Any) -> Messages:
    """Return a document's question and answer as the chat turns of a few-shot example."""
    turns = task.build_qa_turn(q=task.doc_to_text(doc), a=task.doc_to_target(doc), gen_prefix=task.doc_to_prefix(doc))
    return [turn.to_dict() for turn in turns]


def _item(task: str, doc: int) -> str:
    return f"{task}/{doc}/0"


def _stop_strings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)


@contextmanager
def lm_eval_environment() -> Iterator[None]:
    """Run lm-eval silently, with a fixed seed and with compiled templates cached.

    lm-eval draws from the process's random generator, which its own runs seed; this restores the state afterwards.
    Without the cache lm-eval compiles its templates for every question, nine tenths of the time. Do not import a
    library for the first time in here: its log handlers would keep the discarded stream.
    """
    from lm_eval.utils import env

    state, disabled = random.getstate(), logging.root.manager.disable
    random.seed(SEED)
    logging.disable(logging.CRITICAL)
    try:
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            patch.object(env, "from_string", cache(env.from_string)),
        ):
            yield
    finally:
        logging.disable(disabled)
        random.setstate(state)
