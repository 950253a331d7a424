"""IFEval: 541 prompts with instructions a program can check ("no commas", "at least 300 words", "end with …").

Paper: "Instruction-Following Evaluation for Large Language Models", Zhou et al., arXiv 2311.07911. Data: google/IFEval
(Apache-2.0).
Task: lm-eval's `ifeval`, no stop strings, up to 1,280 new tokens; right is an answer that follows all instructions of
its prompt as it stands (`prompt_level_strict_acc`).

    mtbench run --suite ifeval
    mtbench run --suite ifeval --offline --data-dir DIR  # DIR/ifeval/input_data.jsonl and DIR/nltk_data

Two kinds of instruction count sentences or words by NLTK's `punkt_tab`, which is looked for in DIR/nltk_data and where
NLTK keeps its data, and is else fetched. Where it cannot be had, the suite says which they are and refuses, unless
`--skip-unscorable` leaves those prompts out; `left_out` in the result says how many.
For the letters "#" and "!" of two prompts (1122 and 1129) lm-eval draws another at every check; here it always draws
the same. The language of an answer is likewise detected by fixed dice.
"""

import io
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation.lm_eval import HarnessSuite, at_work
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source

PUNKT = "punkt_tab"
TABLES = f"tokenizers/{PUNKT}"  # below a folder of NLTK's data


@SUITES.register("ifeval")
class IfEval(HarnessSuite):
    tasks: ClassVar = {"ifeval": {"train": "ifeval/input_data.jsonl"}}
    folder = "ifeval"
    num_fewshot = 0
    filter = "none"
    metric = "prompt_level_strict_acc"
    max_new_tokens = 1280

    def __init__(self, rest: str, source: Source) -> None:
        _import_checkers()
        super().__init__(rest, source)
        if not _has_punkt(source):
            self._leave_out(source)

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        with _same_languages():
            return super().score(answers)

    def keep(self, folder: Path) -> None:
        """And NLTK's tables, where this machine has them."""
        super().keep(folder)
        import nltk

        with suppress(LookupError):
            tables = Path(nltk.data.find(f"{TABLES}/english"))
            shutil.copytree(tables, folder / "nltk_data" / TABLES / "english", dirs_exist_ok=True)

    def _leave_out(self, source: Source) -> None:
        """What cannot be scored without `punkt_tab`. Raises UserError unless that is wanted."""
        (task,) = self._tasks.values()
        docs = list(task.eval_docs)
        with at_work():
            missing = {number: kinds for number, doc in enumerate(docs) if (kinds := _unscorable(task, doc))}
        if not missing:
            return
        kinds = sorted({kind for of_doc in missing.values() for kind in of_doc})
        if not source.skip_unscorable:
            folder = f"{source.data_dir}/nltk_data" if source.data_dir else "~/nltk_data"
            raise UserError(
                f"suite {self.name!r}: {len(missing)} of {len(docs)} prompts cannot be scored here, those with "
                f"{' or '.join(kinds)}: they need NLTK's {PUNKT}, which is not on this machine"
                f"{'' if source.offline else ' and cannot be fetched'}; put it below {folder}/tokenizers (`python -m "
                f"nltk.downloader {PUNKT}` on another), or leave those out by --skip-unscorable"
            )
        self._left_out = {name: frozenset(missing) for name in self._tasks}
        self.task = {**self.task, "left_out": {"items": len(missing), "needing": PUNKT, "instructions": kinds}}


def _import_checkers() -> None:
    """Import lm-eval's checkers, which would fetch `punkt_tab` as they are imported, offline or not."""
    import nltk

    with patch.object(nltk, "download", lambda *args, **kwargs: False), redirect_stdout(io.StringIO()):
        import lm_eval.tasks.ifeval.instructions_util  # noqa: F401


def _has_punkt(source: Source) -> bool:
    """Whether sentences can be told apart here, if need be after fetching what it takes."""
    import nltk

    folder = str(source.data_dir.resolve() / "nltk_data") if source.data_dir else None
    if folder is not None and folder not in nltk.data.path:
        nltk.data.path.insert(0, folder)
    if _tells_sentences():
        return True
    if source.offline:
        return False
    with at_work():
        nltk.download(PUNKT, quiet=True, print_error_to=io.StringIO())  # else to what stderr was at its import
    return _tells_sentences()


def _tells_sentences() -> bool:
    from nltk.tokenize import PunktTokenizer

    try:
        return len(PunktTokenizer().tokenize("Mr. Smith came. He left.")) == 2  # empty tables would split behind "Mr."
    except LookupError:
        return False


def _unscorable(task: Any, doc: Mapping[str, Any]) -> list[str]:
    """Those of a document's instructions whose check asks NLTK where sentences end."""
    return [
        kind
        for kind, settings in zip(doc["instruction_id_list"], doc["kwargs"], strict=True)
        if _asks_nltk(task, {**doc, "instruction_id_list": [kind], "kwargs": [settings]})
    ]


def _asks_nltk(task: Any, doc: Mapping[str, Any]) -> bool:
    from nltk.tokenize import PunktTokenizer

    class Asked(Exception):
        pass

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Asked

    with patch.multiple(PunktTokenizer, __init__=refuse, tokenize=refuse):
        try:
            task.process_results(doc, ["Some words. More words."])
        except Asked:
            return True
    return False


@contextmanager
def _same_languages() -> Iterator[None]:
    """The detector of languages throws dice of its own, which it seeds by this if told to."""
    from langdetect import DetectorFactory

    with patch.object(DetectorFactory, "seed", 0):
        yield
