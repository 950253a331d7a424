"""GPQA: graduate questions in biology, physics and chemistry with four choices, asked without examples.

Paper: "GPQA: A Graduate-Level Google-Proof Q&A Benchmark", Rein et al., arXiv 2311.12022. Data: Idavidrein/gpqa (CC BY
4.0; its authors ask that the questions not be put where models learn to answer them, so `private`: no file of a run
holds them). The 198 questions of `diamond` are what is reported today; `main` has 448, `extended` 546.
Task: lm-eval's `gpqa_diamond_cot_zeroshot`. Two things here are our choice:
- Of its filters `flexible-extract`, the last "(A)" to "(D)" of the answer: the strict one wants "The answer is (A).",
  which nothing in a prompt without examples asks for, so it measures whether a model happens to say it.
- 2,048 new tokens, MMLU-Pro's budget. The task names none; lm-eval's models then give 256, which cuts reasoning off.

    mtbench run --suite gpqa                             # the hub, behind its terms: accept them, then `hf auth login`
    mtbench run --suite gpqa:main --offline --data-dir DIR
    # DIR/gpqa/dataset.zip as its authors give it (github.com/idavidrein/gpqa), or DIR/gpqa/gpqa_main.csv

The archive is read in memory: the questions are written nowhere.
"""

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtbench.errors import UserError, first_line
from mtbench.evaluation import dataset_files
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES

SUBSETS = ("diamond", "main", "extended")
ARCHIVE = "gpqa/dataset.zip"
PASSWORD = b"deserted-untie-orchid"  # in the authors' README: against crawlers, not against readers


@SUITES.register("gpqa")
class Gpqa(HarnessSuite):
    private = True
    tasks: ClassVar = {f"gpqa_{subset}_cot_zeroshot": {"train": f"gpqa/gpqa_{subset}.csv"} for subset in SUBSETS}
    folder = "gpqa/cot_zeroshot"
    num_fewshot = 0
    filter = "flexible-extract"
    metric = "exact_match"
    max_new_tokens = 2048

    def _choose(self, rest: str, subtasks: Sequence[str]) -> dict[str, str]:
        subset = rest or SUBSETS[0]
        if subset not in SUBSETS:
            raise UserError(f"suite {self.name!r} has no subset {rest!r}; known: {', '.join(SUBSETS)}")
        task = f"gpqa_{subset}_cot_zeroshot"
        return {task: task}

    def _locate(self, data_dir: Path, file: str) -> Path:
        for path in (data_dir / file, data_dir / ARCHIVE):
            if path.is_file():
                return path
        raise UserError(
            f"suite {self.name!r}: no file {data_dir / file} nor {data_dir / ARCHIVE}; put the archive of "
            "github.com/idavidrein/gpqa there, as it is"
        )

    def _read(self, path: Path, file: str) -> Any:
        if path.suffix != ".zip":
            return super()._read(path, file)
        name = Path(file).name
        try:
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.namelist() if Path(m).name == name and not m.startswith("__MACOSX")]
                if not members:
                    raise UserError(f"suite {self.name!r}: {path} has no {name} in it; is it the authors' archive?")
                text = archive.read(members[0], PASSWORD)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:  # RuntimeError: the password
            raise UserError(
                f"suite {self.name!r}: cannot unpack {path} ({first_line(error)}); fetch it anew from "
                f"github.com/idavidrein/gpqa, or unpack it by the password given there to {path.with_name(name)}"
            ) from None
        return dataset_files.read(io.BytesIO(text), ".csv")
