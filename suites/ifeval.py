"""IFEval: 541 prompts with instructions that a program can check ("no commas", "at least 300 words", "end with …").

Paper: "Instruction-Following Evaluation for Large Language Models", Zhou et al., arXiv 2311.07911. Data: google/IFEval
(Apache-2.0).
Task: lm-eval's `ifeval`, without stop strings, up to 1,280 new tokens. Score (`prompt_level_strict_acc`): 1 if the
unchanged answer follows all instructions of its prompt.

    mtbench run --suite ifeval
    mtbench run --suite ifeval --offline --data-dir DIR  # DIR/ifeval/input_data.jsonl and DIR/nltk_data

Two kinds of instruction count sentences or words with NLTK's `punkt_tab`. The suite looks for it in DIR/nltk_data and
in NLTK's own folders, and otherwise downloads it. If that fails, the suite raises an error that names the instructions;
`--skip-unscorable` leaves their prompts out, and `left_out` in the result counts them.
For the letters "#" and "!" of two prompts (1122 and 1129) lm-eval draws another letter at every check; mtbench fixes
the random seed. It also fixes the seed of the language detection.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation.lm_eval import HarnessSuite, lm_eval_environment
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Reading, Source

PUNKT = "punkt_tab"
NEED_PUNKT = {"change_case:capital_word_frequency", "length_constraints:number_sentences"}


@SUITES.register("ifeval")
class IfEval(HarnessSuite):
    tasks: ClassVar = {"ifeval": {"train": "ifeval/input_data.jsonl"}}
    folder = "ifeval"
    num_fewshot = 0
    filter = "none"
    metric = "prompt_level_strict_acc"
    max_new_tokens = 1280

    def __init__(self, variant: str, source: Source) -> None:
        _import_checkers()
        super().__init__(variant, source)
        self._scorable: list[int] | None = None  # documents to use; None: all
        if not _find_punkt(source):
            self._exclude_unscorable(source)

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        with _fixed_language_detection():
            return super().read(answers)

    def _selected_docs(self, name: str, limit: int | None) -> list[int] | None:
        return None if self._scorable is None else self._scorable[:limit]

    def _exclude_unscorable(self, source: Source) -> None:
        """Exclude the prompts that need `punkt_tab`. Raise UserError if there are any and `skip_unscorable` is off."""
        (task,) = self._tasks.values()
        docs = list(task.eval_docs)
        needing = {doc_id: NEED_PUNKT & {*doc["instruction_id_list"]} for doc_id, doc in enumerate(docs)}
        excluded = [doc_id for doc_id, kinds in needing.items() if kinds]
        if not excluded:
            return
        kinds = sorted(set().union(*needing.values()))
        if not source.skip_unscorable:
            folder = f"{source.data_dir}/nltk_data" if source.data_dir else "~/nltk_data"
            reason = "is not on this machine" if source.offline else "is not on this machine and cannot be downloaded"
            raise UserError(
                f"suite {self.name!r}: cannot score {len(excluded)} of {len(docs)} prompts, those with "
                f"{' or '.join(kinds)}: they need NLTK's {PUNKT}, which {reason}; put it below {folder}/tokenizers "
                f"(`python -m nltk.downloader {PUNKT}` on another machine), or leave these prompts out with "
                "--skip-unscorable"
            )
        self._scorable = [doc_id for doc_id, kinds in needing.items() if not kinds]
        self.task = {**self.task, "left_out": {"items": len(excluded), "needing": PUNKT, "instructions": kinds}}


def _import_checkers() -> None:
    """Import lm-eval's checkers without letting them download `punkt_tab`, which they do at import, even offline."""
    import nltk

    with patch.object(nltk, "download", lambda *args, **kwargs: False), redirect_stdout(io.StringIO()):
        import lm_eval.tasks.ifeval.instructions_util  # noqa: F401


def _find_punkt(source: Source) -> bool:
    """Return whether NLTK can split sentences on this machine; download its tables if necessary and allowed."""
    import nltk

    folder = str(source.data_dir.resolve() / "nltk_data") if source.data_dir else None
    if folder is not None and folder not in nltk.data.path:
        nltk.data.path.insert(0, folder)
    if _can_split_sentences():
        return True
    if source.offline:
        return False
    with lm_eval_environment():
        # Without `print_error_to`, NLTK writes errors to the stderr of the time of its import.
        nltk.download(PUNKT, quiet=True, print_error_to=io.StringIO())
    return _can_split_sentences()


def _can_split_sentences() -> bool:
    from nltk.tokenize import PunktTokenizer

    try:
        return len(PunktTokenizer().tokenize("Mr. Smith came. He left.")) == 2  # empty tables would split after "Mr."
    except LookupError:
        return False


@contextmanager
def _fixed_language_detection() -> Iterator[None]:
    """Seed the language detector, which draws random numbers from its own generator."""
    from langdetect import DetectorFactory

    with patch.object(DetectorFactory, "seed", 0):
        yield
