"""lm-evaluation-harness behind one door: its tasks ask, mtbench generates, its filters and metrics score.

Source: github.com/EleutherAI/lm-evaluation-harness, tried with 0.4.13. A task is asked for its requests twice: before
generation, which needs what they say, and after it, when each is given the answer that was stored.
`lm_eval` takes a second to import and is needed before and after generation only, so it is imported inside functions.
"""

import io
import logging
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import version
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation import dataset_files
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, Template

# lm-eval's own seeds: its published runs show these examples in this order, so ours do whatever the run's seed
FEWSHOT_SEED = 1234
SEED = 0


class HarnessSuite(Suite):
    """A suite made of lm-eval tasks. A suite file gives the values below and nothing else.

    Where there are several, `subtasks` has their short names in the same order.
    """

    tasks: ClassVar[Mapping[str, Mapping[str, str]]]  # lm-eval's task -> split -> file below --data-dir
    group: ClassVar[str] = ""  # lm-eval's name for several tasks together; its own mean of them is over items
    folder: ClassVar[str]  # where lm-eval keeps them, below lm_eval/tasks: indexing all of it takes ten seconds
    field: ClassVar[str | None] = None  # where in a JSON file its rows stand; None: it is a list of them
    num_fewshot: ClassVar[int] = 0
    stop: ClassVar[tuple[str, ...] | None] = None  # strings that end an answer; None: lm-eval's own
    chat_template: ClassVar[bool] = True  # False: its text is the beginning of what is to be written, and no question
    filter: ClassVar[str]  # of the task's filters, the one whose score is told
    metric: str  # of its metrics, likewise

    def __init__(self, rest: str, source: Source) -> None:
        named = self._choose(rest, source.subtasks)
        self._tasks = self._load(named, source)  # as its items call it -> lm-eval's task
        self._left_out: dict[str, frozenset[int]] = {}  # documents that are not asked, by task
        self.task = {
            "name": self.group or ",".join(named.values()),
            "version": ",".join(sorted({str(task.VERSION) for task in self._tasks.values()})),
            "num_fewshot": self.num_fewshot,
            "chat_template": self.chat_template,
            "fewshot_as_multiturn": self.chat_template,  # examples are turns of their own: lm-eval's default in a chat
            "fewshot_seed": FEWSHOT_SEED,
            "metric": self.metric,
            "filter": self.filter,
            "harness": f"lm-eval {version('lm-eval')}",
            **({"mean": "micro", "subtasks": list(named)} if self.group else {}),
        }

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Several tasks take turns (first item of each, second of each, …), so that a limit cuts them all alike."""
        with at_work():
            asked = [
                (doc, name, request)
                for name, task in self._tasks.items()
                for doc, request in self._asked(task, self._docs(name, limit), limit, template)
            ]
        asked.sort(key=lambda one: one[0])
        return [
            Prompt(item=_item(name, doc), text=request.args[0], stop=_stop(request.args[1]))
            for doc, name, request in asked
        ]

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """Any subset of the items; each is judged alone."""
        replies: dict[str, dict[int, str]] = {}
        for item, answer in answers.items():
            name, number, _ = item.split("/")
            replies.setdefault(name, {})[int(number)] = answer
        scores = {}
        with at_work():
            for name, of_task in replies.items():
                task = self._tasks[name]
                requests = self._requests(task, sorted(of_task))
                for doc, request in requests:
                    request.resps = [of_task[doc]]
                task.apply_filters()
                for doc, request in requests:
                    random.seed(SEED)  # some checks draw, and what one draws must not hang on who was judged before
                    result = task.process_results(request.doc, [request.filtered_resps[self.filter]])
                    scores[_item(name, doc)] = float(result[self.metric])
        return scores

    def _choose(self, rest: str, subtasks: Sequence[str]) -> dict[str, str]:
        """A task as its items call it -> lm-eval's name. Raises UserError if `rest` is not understood."""
        if rest:
            raise UserError(f"suite {self.name!r} takes nothing behind a colon, not {rest!r}")
        named = dict(zip(self.subtasks or self.tasks, self.tasks, strict=True))
        return {name: named[name] for name in subtasks or named}

    def _docs(self, name: str, limit: int | None) -> list[int] | None:
        """The documents of a task that are asked; None: the first `limit`, whichever they are."""
        if not self._left_out.get(name):
            return None
        count = len(self._tasks[name].eval_docs)
        return [doc for doc in range(count) if doc not in self._left_out[name]][:limit]

    def _asked(self, task: Any, docs: list[int] | None, limit: int | None, template: Template) -> list[tuple[int, Any]]:
        """Documents and lm-eval's requests for them, as a model is to read them."""

        def write(messages: Messages, add_generation_prompt: bool = True) -> str:
            if add_generation_prompt:
                return template(messages)
            return template(messages[:-1]) + messages[-1]["content"]  # the task begins the answer itself

        if not self.chat_template:
            return self._requests(task, docs, limit, num_fewshot=self.num_fewshot)
        chat = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": write}
        return self._requests(task, docs, limit, num_fewshot=self.num_fewshot, **chat)

    def _requests(
        self, task: Any, docs: list[int] | None, limit: int | None = None, num_fewshot: int = 0, **chat: Any
    ) -> list[tuple[int, Any]]:
        """By document; of `docs`, or of the first `limit`."""
        if docs == []:
            return []  # lm-eval reads an empty selection as "all"
        task.set_config("num_fewshot", num_fewshot)
        task.set_fewshot_seed(FEWSHOT_SEED)  # every pass starts the draw anew: item k always gets draw k
        task.build_all_requests(limit=limit if docs is None else None, samples=docs, **chat)
        return [(one.doc_id if docs is None else docs[one.doc_id], one) for one in task.instances]

    # --- Loading --------------------------------------------------------------------------------------------------

    def _load(self, named: Mapping[str, str], source: Source) -> dict[str, Any]:
        """lm-eval's tasks with their data. Raises UserError if it cannot be had or is of no use here."""
        files = {file for task in named.values() for file in self.tasks[task].values()}
        data_dir = source.data_dir
        self._files = {file: self._locate(data_dir, file) for file in sorted(files)} if data_dir else {}
        if source.offline:
            go_offline()
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager

        try:
            # In memory: what lm-eval makes of documents would be cached, and then be that of whichever run was first.
            with at_work(), patch.object(datasets.config, "IN_MEMORY_MAX_SIZE", 2**40):
                data = {file: self._read(path, file) for file, path in self._files.items()}
                # Members of a group are merged with the task lm-eval knows by that name; a task alone would not be.
                members = [{"task": task, **self._local(task, data)} for task in named.values()]
                index = Path(lm_eval.__file__).parent / "tasks" / self.folder
                manager = TaskManager(include_defaults=False, include_path=index)
                loaded = manager.load({"group": "mtbench", "task": members})["tasks"]
        except UserError:
            raise
        except Exception as error:  # datasets, pyarrow, jinja and the hub's client each raise their own
            raise self._unusable(sorted(files), source, error) from error
        tasks = {name: loaded[task] for name, task in named.items()}
        self._data = data or {
            file: loaded[task].dataset[split] for task in named.values() for split, file in self.tasks[task].items()
        }
        for task in tasks.values():
            self._settle(task)
        return tasks

    def _local(self, task: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """What a task's configuration says instead, when its data comes from files."""
        splits = {split: data[file] for split, file in self.tasks[task].items()} if data else {}
        return {"custom_dataset": lambda **_: splits} if data else {}

    def _settle(self, task: Any) -> None:
        """Fix what lm-eval would do anew, or otherwise. Raises UserError if it has nothing to generate."""
        if task.OUTPUT_TYPE != "generate_until":
            raise UserError(
                f"suite {self.name!r}: lm-eval's {task.config.task} is of the type {task.OUTPUT_TYPE}: it compares the "
                "likelihoods of given texts. Nothing is generated, so there is nothing to speed up; take a task of the "
                "type generate_until."
            )
        if self.stop is not None:
            task.set_config("generation_kwargs", {"until": list(self.stop)}, update=True)
        if process := task.config.process_docs:
            # lm-eval does this whenever it looks at its documents, which costs seconds, and where choices are shuffled
            # gives another order each time. Its own runs cache the first.
            with at_work():
                config = task.config
                splits = {config.training_split, config.validation_split, config.test_split} & {*task.dataset}
                task.dataset = {**task.dataset, **{split: process(task.dataset[split]) for split in sorted(splits)}}
                config.process_docs = None

    def _locate(self, data_dir: Path, file: str) -> Path:
        """A file below the data folder, packed (.gz) or not. Raises UserError if there is none."""
        path = data_dir / file
        packed = path.with_name(path.name + ".gz")
        if not path.is_file() and not packed.is_file():
            raise UserError(f"suite {self.name!r}: no file {path} (nor {packed.name}); --data-dir DIR holds {file}")
        return path if path.is_file() else packed

    def _read(self, path: Path, file: str) -> Any:
        """The data set in what was found at `path` for `file`."""
        return dataset_files.rows(path, self.field)

    def _unusable(self, files: Sequence[str], source: Source, error: Exception) -> UserError:
        cause = error.__cause__ or error  # datasets says "an error occurred"; its cause says which
        if source.data_dir:
            where, more = f"below {source.data_dir}", ""
        elif source.offline:
            where, more = "in the cache", ", or run once without --offline"
        else:
            where = "on the Hugging Face hub"
            more = ", or --offline if it is cached (and --checkpoint ROLE=PATH for a model on disk)"
        named = " and ".join(files if len(files) < 3 else (files[0], f"{len(files) - 1} more"))
        return UserError(
            f"suite {self.name!r}: no usable data {where} ({type(cause).__name__}: "
            f"{' '.join(str(cause).split())[:200]}); pass --data-dir DIR with {named} in it{more}"
        )

    # --- Carrying -------------------------------------------------------------------------------------------------

    def keep(self, folder: Path) -> None:
        """The files of a data folder as they lie there; what came from the hub in the form that `tasks` names."""
        if self.private and not all(path.suffix == ".zip" for path in self._files.values() or [Path()]):
            raise UserError(
                f"suite {self.name!r} is carried only as its authors' encrypted archive, for they ask that its text "
                "not be spread; put that below --data-dir, or leave the suite out of the bundle"
            )
        for file, data in self._data.items():
            source = self._files.get(file)
            kept = (folder / file).with_name(source.name if source else Path(file).name)
            kept.parent.mkdir(parents=True, exist_ok=True)
            if source:
                shutil.copyfile(source, kept)
            else:
                with at_work():
                    dataset_files.write(data, kept, self.field)


class TrainableSuite(HarnessSuite):
    """One whose tasks come with a training split, which is not asked."""

    def examples(self, count: int | None, seed: int) -> list[Messages]:
        """The training documents as lm-eval shows worked examples. Nothing is drawn; several tasks take turns."""
        tasks = list(self._tasks.values())
        if any(task.config.training_split not in task.dataset for task in tasks):
            raise UserError(f"suite {self.name!r} has no training split in its data")
        rounds = zip_longest(*(task.training_docs() for task in tasks))
        turns = ((task, doc) for docs in rounds for task, doc in zip(tasks, docs, strict=True) if doc is not None)
        with at_work():
            return [_example(task, doc) for task, doc in islice(turns, count)]


def _example(task: Any, doc: Any) -> Messages:
    """Question and answer as they stand among a prompt's worked examples."""
    turns = task.build_qa_turn(q=task.doc_to_text(doc), a=task.doc_to_target(doc), gen_prefix=task.doc_to_prefix(doc))
    return [turn.to_dict() for turn in turns]


def _item(task: str, doc: int) -> str:
    return f"{task}/{doc}/0"


def _stop(settings: Mapping[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)


def go_offline() -> None:
    """No network from here on, in this process and its children."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    # Both read the environment once, when imported, and transformers may have imported the first already.
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


@contextmanager
def at_work() -> Iterator[None]:
    """lm-eval, as it is here: silent, repeatable and not slow.

    It shuffles by the process's generator, which its own runs seed, and here is put back afterwards. It compiles its
    templates anew for every question, which would be nine tenths of the time.
    """
    from lm_eval.utils import env

    state = random.getstate()
    random.seed(SEED)
    try:
        with quiet(), patch.object(env, "from_string", cache(env.from_string)):
            yield
    finally:
        random.setstate(state)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps progress bars, prints and log lines of others off the terminal; what goes wrong is raised all the same.

    Nothing may be imported for the first time in here: its log handlers would keep the stream that is thrown away.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
