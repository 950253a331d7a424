"""lm-evaluation-harness behind one door: its tasks ask, mtbench generates, its filters and metrics score.

Source: github.com/EleutherAI/lm-evaluation-harness, tried with 0.4.13. A task is run twice, each time with a model
that does not think: the first writes down what it is asked, the second reads out the answers that were stored.
`lm_eval` takes a second to import and is needed before and after generation only, so it is imported inside functions.
"""

import glob
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import version
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.suite import Messages, Prompt, Source, Suite, Template

FEWSHOT_SEED = 1234  # lm-eval's own: its published runs show these examples, so ours do whatever the run's seed


class HarnessSuite(Suite):
    """A suite made of lm-eval tasks. A suite file gives the values below and nothing else."""

    tasks: ClassVar[Mapping[str, Mapping[str, str]]]  # lm-eval's task -> split -> file below --data-dir
    folder: ClassVar[str]  # where lm-eval keeps them, below lm_eval/tasks: indexing all of it takes ten seconds
    reader: ClassVar[str] = "json"  # what reads those files: json, parquet or csv
    num_fewshot: ClassVar[int] = 0
    filter: ClassVar[str]  # of the task's filters, the one whose score is told
    metric: str  # of its metrics, likewise

    def __init__(self, rest: str, source: Source) -> None:
        if rest:
            raise UserError(f"suite {self.name!r} takes nothing behind a colon, not {rest!r}")
        self._tasks = self._load(source)
        self.task = {
            "name": ",".join(self.tasks),
            "version": ",".join(str(task.VERSION) for task in self._tasks.values()),
            "num_fewshot": self.num_fewshot,
            "chat_template": True,
            "fewshot_as_multiturn": True,  # examples are turns of their own: lm-eval's default with a chat template
            "fewshot_seed": FEWSHOT_SEED,
            "filter": self.filter,
            "harness": f"lm-eval {version('lm-eval')}",
        }

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Several tasks take turns (first item of each, second of each, …), so that a limit cuts them all alike."""
        asked: list[Any] = []

        def note(request: Any) -> str:
            asked.append(request)
            return ""

        self._evaluate(note, template=template, num_fewshot=self.num_fewshot, limit=limit)
        asked.sort(key=lambda request: request.doc_id)
        return [
            Prompt(item=_item(request.task_name, request.doc_id), text=request.args[0], stop=_stop(request.args[1]))
            for request in asked[:limit]
        ]

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """Any subset of the items; each is judged alone."""
        docs: dict[str, list[int]] = {}
        for item in answers:
            task, doc, _ = item.split("/")
            docs.setdefault(task, []).append(int(doc))
        if not docs:
            return {}  # lm-eval reads an empty selection as "all"
        docs = {task: sorted(chosen) for task, chosen in docs.items()}  # lm-eval numbers the chosen in their own order

        def recall(request: Any) -> str:
            return answers[_item(request.task_name, docs[request.task_name][request.doc_id])]

        return {
            _item(task, sample["doc_id"]): float(sample[self.metric])
            for task, samples in self._evaluate(recall, samples=docs).items()
            for sample in samples
            if sample["filter"] == self.filter
        }

    def examples(self, count: int | None, seed: int) -> list[Messages]:
        """The training documents as lm-eval shows worked examples. Nothing is drawn; several tasks take turns."""
        from lm_eval.utils import env

        tasks = list(self._tasks.values())
        if any(task.config.training_split not in task.dataset for task in tasks):
            raise UserError(f"suite {self.name!r} has no training split in its data")
        rounds = zip_longest(*(task.training_docs() for task in tasks))
        turns = ((task, doc) for docs in rounds for task, doc in zip(tasks, docs, strict=True) if doc is not None)
        with _quiet(), patch.object(env, "from_string", cache(env.from_string)):
            return [_example(task, doc) for task, doc in islice(turns, count)]

    def _evaluate(
        self,
        reply: Callable[[Any], str],
        *,
        template: Template | None = None,
        num_fewshot: int = 0,
        limit: int | None = None,
        samples: Mapping[str, list[int]] | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """One pass: what lm-eval logged, by task. Without a template the prompts are of no account."""
        # Not `simple_evaluate`: it seeds the process's generators and asks pip, git and the driver for their versions.
        from lm_eval import evaluate
        from lm_eval.utils import env

        tasks = {name: task for name, task in self._tasks.items() if samples is None or name in samples}
        for task in tasks.values():
            task.set_config("num_fewshot", num_fewshot)
            task.set_fewshot_seed(FEWSHOT_SEED)  # every pass starts the draw anew: item k always gets draw k
        # lm-eval compiles its task's templates anew for every question, which would be nine tenths of the time.
        with _quiet(), patch.object(env, "from_string", cache(env.from_string)):
            results = evaluate(
                lm=_model(reply, template),
                task_dict={"tasks": tasks},
                limit=limit,
                samples=samples,
                bootstrap_iters=0,
                apply_chat_template=template is not None,
                fewshot_as_multiturn=template is not None,
            )
        return dict(results["samples"])

    def _load(self, source: Source) -> dict[str, Any]:
        """lm-eval's tasks by name, with their data. Raises UserError if the data cannot be had."""
        # Members of a group are merged with the task lm-eval knows by that name; a task given alone would not be.
        members = [{"task": name, **self._override(files, source.data_dir)} for name, files in self.tasks.items()]
        if source.offline:
            go_offline()
        import lm_eval
        from lm_eval.tasks import TaskManager

        try:
            with _quiet():
                index = Path(lm_eval.__file__).parent / "tasks" / self.folder
                manager = TaskManager(include_defaults=False, include_path=index)
                return dict(manager.load({"group": "mtbench", "task": members})["tasks"])
        except Exception as error:  # datasets, pyarrow, jinja and the hub's client each raise their own
            cause = error.__cause__ or error  # datasets says "an error occurred"; its cause says which
            if source.data_dir:
                where, more = f"below {source.data_dir}", ""
            elif source.offline:
                where, more = "in the cache", ", or run once without --offline"
            else:
                where = "on the Hugging Face hub"
                more = ", or --offline if it is cached (and --checkpoint ROLE=PATH for a model on disk)"
            files = " and ".join(sorted({file for split in self.tasks.values() for file in split.values()}))
            raise UserError(
                f"suite {self.name!r}: no usable data {where} ({type(cause).__name__}: "
                f"{' '.join(str(cause).split())[:200]}); pass --data-dir DIR with {files} in it{more}"
            ) from error

    def _override(self, files: Mapping[str, str], data_dir: Path | None) -> dict[str, Any]:
        """What a task's configuration says instead, when its data comes from a folder. Packed files (.gz) will do."""
        if data_dir is None:
            return {}
        found = {}
        for split, file in files.items():
            path = data_dir.resolve() / file
            packed = path.with_name(path.name + ".gz")
            if not path.is_file() and not packed.is_file():
                raise UserError(f"suite {self.name!r}: no file {path} (nor {packed.name}); --data-dir DIR holds {file}")
            # datasets expands patterns, and would take a bracket in a folder's name for one
            found[split] = glob.escape(str(path if path.is_file() else packed))
        return {"dataset_path": self.reader, "dataset_name": None, "dataset_kwargs": {"data_files": found}}


def _example(task: Any, doc: Any) -> Messages:
    """Question and answer as they stand among a prompt's worked examples."""
    turns = task.build_qa_turn(q=task.doc_to_text(doc), a=task.doc_to_target(doc), gen_prefix=task.doc_to_prefix(doc))
    return [turn.to_dict() for turn in turns]


def _item(task: str, doc: int) -> str:
    return f"{task}/{doc}/0"


def _stop(settings: Mapping[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)


def _model(reply: Callable[[Any], str], template: Template | None) -> Any:
    """An lm-eval model that answers each request by `reply` and writes conversations by `template`."""
    from lm_eval.api.model import LM

    class Stored(LM):  # type: ignore[misc]  # lm_eval is untyped
        tokenizer_name = ""  # only names lm-eval's cache of requests, which is off

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [reply(request) for request in requests]

        def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True) -> str:
            assert template is not None
            if add_generation_prompt:
                return template(messages)
            return template(messages[:-1]) + messages[-1]["content"]  # the task begins the answer itself

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError("a task that compares likelihoods says nothing about decoding")

        loglikelihood_rolling = loglikelihood

    return Stored()


def go_offline() -> None:
    """No network from here on, in this process and its children."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    # Both read the environment once, when imported, and transformers may have imported the first already.
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


@contextmanager
def _quiet() -> Iterator[None]:
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
