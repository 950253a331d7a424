"""The interface of a suite: a benchmark that supplies prompts, a token budget, stop strings and scores.

A suite is one class in a file of suites/ or in a plugin's module (see registry.py). It never sees a model: `prompts`
must be deterministic, and `read` may rely only on item ids, texts and the suite's own data. A suite that scores
nothing needs `__init__` and `prompts` only. docs/add-suite.md has an example, the three stages and the base classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtbench.errors import UserError, first_line
from mtbench.evaluation.answer_format import AnswerFormat

Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "..."}]

# The chat template, (messages, tools=()): a conversation as text, ready for the assistant's answer. `tools`: those that
# it may call, as in OpenAI's API.
Template = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The options of a run that a suite may need: the folder of its data, the seed, and the parts to include."""

    data_dir: Path | None = None  # `--data-dir`, laid out as `data_dir/<suite>/…`; None: the suite's default location
    offline: bool = False  # never use the network
    seed: int = 0  # for everything that the suite draws
    subtasks: tuple[str, ...] = ()  # requested subtasks of this suite; (): all
    skip_unscorable: bool = False  # leave out items that this machine cannot score, instead of raising UserError
    unsandboxed: bool = False  # run generated programs without a sandbox
    metric: str | None = None  # requested metric, one of `Suite.metrics`; None: the suite's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One item of a suite: the text that the model reads.

    A conversation of several turns has one Prompt for each turn. The model reads a later turn as the prompt that it
    `follows`, the model's own answer to that prompt, and then this text; of a `recorded` conversation this text alone.
    """

    item: str  # unique id `<task>/<doc id>/<turn>`; does not depend on the limit
    text: str  # as the chat template writes it, or plain text
    stop: tuple[str, ...] = ()  # strings that end the answer, besides the checkpoint's end tokens
    tokens: int | None = None  # cut the prompt to this many tokens; None: keep all
    follows: str | None = None  # the item of the previous turn; None: this is a first turn
    recorded: bool = False  # `text` is a whole prompt, with recorded answers to the turns before
    answer_format: AnswerFormat | None = None  # what an answer must be; None: any text
    think_s: float = 0.0  # between the answer to the previous turn and this prompt, in a load
    scored: bool = True  # False: the item has no answer to compare with, so `score` does not get it
    plain: bool = False  # no template wrote it, so the tokenizer adds its special tokens; set in planning


@dataclass(frozen=True, slots=True)
class Reading:
    """What a suite reads in one answer."""

    score: float  # in [0, 1], by the rule of the benchmark's owner
    unread: str | None = None  # why that rule finds no result, such as "no number behind ####"; None: it finds one
    by_value: float | None = None  # in [0, 1], by the value of the result in whatever notation; None: not read so


class Suite:
    """One benchmark. Subclasses set the attributes below and implement the methods.

    `variant` is the text behind the colon in `--suite name:variant`, and "" without a colon.
    """

    name: ClassVar[str]  # set by `SUITES.register`
    family: ClassVar[str] = "qwen2.5-0.5b"  # checkpoints to use if the user names none
    max_new_tokens: int = 256  # token budget of an answer, unless the user gives another
    metric: str | None = None  # name of the score; None: the suite measures speed and agreement only
    metrics: ClassVar[tuple[str, ...]] = ()  # names that `--metric` may choose from
    flags: Sequence[str] = ()  # remarks on the data that the report repeats
    task: Mapping[str, Any] = {}  # describes the task in results.json: name, num_fewshot, chat_template, filter, …
    subtasks: ClassVar[tuple[str, ...]] = ()  # names of the parts, if any; each is the `<task>` of its items
    shortens: ClassVar[bool] = False  # turns that do not fit the context are left out, and not refused
    private: ClassVar[bool] = False  # the authors ask not to publish the text: run directories do not store prompts

    def __init__(self, variant: str, source: Source) -> None:
        """Load the data. Raise UserError for an unknown `variant`, or if the data are not available."""
        raise NotImplementedError

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Return the first `limit` items of each subtask (None: all); a conversation counts as one.

        A smaller limit must return the beginning of the same list. Turns follow the item that they continue.
        """
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Derive `score` from `read` or `read` from `score`, where a class defines one of them."""
        if "read" in vars(cls) and "score" not in vars(cls):
            cls.score = lambda self, answers: {  # type: ignore[method-assign]
                item: reading.score for item, reading in cls.read(self, answers).items()
            }
        elif "score" in vars(cls) and "read" not in vars(cls):
            cls.read = lambda self, answers: {  # type: ignore[method-assign]
                item: Reading(score) for item, score in cls.score(self, answers).items()
            }

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        """Return what is read in each item of `answers` (item -> generated text). A suite has this method or `score`.

        `answers` may hold any subset of the items; a reading must not depend on which. Called only if `metric` is set.
        Reasons of `unread` are counted, so they are few and hold nothing of an answer.
        """
        raise NotImplementedError

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """Return a score in [0, 1] for each item of `answers`: that of `read`, unless the suite has this method."""
        raise NotImplementedError

    def examples(self, count: int | None, seed: int) -> Iterable[Messages]:
        """Return the first `count` training conversations (None: all); none of them may be an item.

        Raise UserError if there are none.
        """
        raise UserError(f"suite {self.name!r} has no training split")

    @classmethod
    def cell_prefix(cls, variant: str) -> str:
        """Return the suite's part of a cell id for a `variant` that is not empty."""
        return f"{cls.name}_{variant}"


@contextmanager
def suite_errors(spec: str) -> Iterator[None]:
    """Turn exceptions of the suite `spec` into a one-line UserError that names it; UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"suite {spec!r} failed: {reason}; fix the suite, or leave out `--suite {spec}`.") from error
