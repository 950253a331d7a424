"""What a suite is: prompts, a budget, stop strings, a score.

A suite is one file in suites/. It never sees a model: it is asked for prompts before generation and for scores
after it, so both can happen on a machine without a GPU (and generation on one without the suite's libraries).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mtbench.errors import UserError, first_line

Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": "..."}]


class Template(Protocol):
    """Turns a conversation into the text a checkpoint expects (the tokenizer's chat template)."""

    def __call__(self, messages: Messages) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a suite may find its data, and the seed of whatever it draws."""

    data_dir: Path | None = None  # a folder laid out as `data_dir/<suite>/…`; None: the suite's usual place
    offline: bool = False
    seed: int = 0
    subtasks: tuple[str, ...] = ()  # of the suite's, those asked for; (): all
    skip_unscorable: bool = False  # leave out items whose score cannot be had here, instead of refusing them all
    unsandboxed: bool = False  # run generated programs although nothing confines them


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One item. `item` is `<task>/<doc id>/<turn>` and does not change with the limit.

    A later turn of a conversation `follows` the item before it: what is read is that item's prompt, whatever was
    answered to it, and then this text.
    """

    item: str
    text: str  # chat template applied: tokenised as it is, no special tokens added
    stop: tuple[str, ...] = ()  # strings that end the answer, apart from the checkpoint's end token
    tokens: int | None = None  # the prompt is the text's first so many; None: all of them
    follows: str | None = None  # the item whose answer comes before this text


class Suite:
    """One benchmark. `rest` is what stood behind the colon in `--suite name:rest`."""

    name: ClassVar[str]
    family: ClassVar[str] = "qwen2.5-0.5b"  # the checkpoints it runs on when none is named
    max_new_tokens: int = 256
    metric: str | None = None  # the name of what `score` returns; None: speed and agreement only
    task: Mapping[str, Any] = {}  # what was asked, for results.json: name, num_fewshot, chat_template, filter
    subtasks: ClassVar[tuple[str, ...]] = ()  # what it is made of, if of several: each is the task of its items
    private: ClassVar[bool] = False  # its authors ask that its text not be spread: no run directory holds its prompts

    def __init__(self, rest: str, source: Source) -> None:
        """Raises UserError if `rest` is not understood or the data cannot be had."""
        raise NotImplementedError

    @classmethod
    def stem(cls, rest: str) -> str:
        """The suite's part of a cell's id when `rest` is given."""
        return f"{cls.name}_{rest}"

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """The first `limit` items (None: all) of each subtask, in an order that `limit` does not change.

        A conversation of several turns counts once.
        """
        raise NotImplementedError

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """item -> score in [0, 1] for item -> generated text. Called only if `metric` is named."""
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write all its data below `folder`, as `--data-dir` reads them. Raises UserError if they cannot be carried."""
        raise UserError(
            f"suite {self.name!r} does not say how its data are carried; make the bundle without it, and copy them by "
            "hand for `--data-dir`"
        )

    @classmethod
    def found(cls, rest: str, data_dir: Path) -> str:
        """What `rest` is on a machine that has the data below `data_dir`: another, if it names a file."""
        return rest

    def examples(self, count: int | None, seed: int) -> Iterable[Messages]:
        """The first `count` conversations to train on (None: all), none of them an item. Raises UserError if none."""
        raise UserError(f"suite {self.name!r} has no training split")


@contextmanager
def answering(spec: str) -> Iterator[None]:
    """What a suite's own code raises, other than its word to the user, as one line that names the suite."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"suite {spec!r} broke: {said}. Mend it, or leave `--suite {spec}` out.") from error
