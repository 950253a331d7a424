"""GPQA: graduate-level questions in biology, physics and chemistry with four choices, zero-shot.

Paper: "GPQA: A Graduate-Level Google-Proof Q&A Benchmark", Rein et al., arXiv 2311.12022. Data: Idavidrein/gpqa (CC BY
4.0). The authors ask not to publish the questions where models may train on them, so the suite is `private`: no file of
a run holds them. Papers report the subset `diamond` (198 questions); `main` has 448 and `extended` 546.
Task: lm-eval's `gpqa_diamond_cot_zeroshot`. mtbench chooses two settings:
- The filter `flexible-extract`, the last "(A)" to "(D)" of the answer. The strict filter needs "The answer is (A).",
  which a prompt without examples does not request.
- 2,048 new tokens, MMLU-Pro's budget. The task sets none, and lm-eval's default of 256 cuts reasoning off.

    mtbench run --suite gpqa                             # from the hub: accept its terms, then `hf auth login`
    mtbench run --suite gpqa:main --offline --data-dir DIR
    # DIR/gpqa/dataset.zip, the authors' archive (github.com/idavidrein/gpqa), or DIR/gpqa/gpqa_main.csv

The suite unpacks the archive in memory and never writes the questions to disk.
"""

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtbench.errors import UserError, first_line
from mtbench.evaluation import dataset_files
from mtbench.evaluation.by_value import same_letters
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES

SUBSETS = ("diamond", "main", "extended")
ARCHIVE = "gpqa/dataset.zip"
PASSWORD = b"deserted-untie-orchid"  # published in the authors' README; it only keeps crawlers out


@SUITES.register("gpqa")
class Gpqa(HarnessSuite):
    private = True
    tasks: ClassVar = {f"gpqa_{subset}_cot_zeroshot": {"train": f"gpqa/gpqa_{subset}.csv"} for subset in SUBSETS}
    folder = "gpqa/cot_zeroshot"
    num_fewshot = 0
    filter = "flexible-extract"
    nothing = "no choice"
    same_values = staticmethod(same_letters)
    metric = "exact_match"
    max_new_tokens = 2048

    def _select_tasks(self, variant: str, subtasks: Sequence[str]) -> dict[str, str]:
        subset = variant or SUBSETS[0]
        if subset not in SUBSETS:
            raise UserError(f"suite {self.name!r} has no subset {variant!r}; known: {', '.join(SUBSETS)}")
        task = f"gpqa_{subset}_cot_zeroshot"
        return {task: task}

    def _locate(self, data_dir: Path, file: str) -> Path:
        for path in (data_dir / file, data_dir / ARCHIVE):
            if path.is_file():
                return path
        raise UserError(
            f"suite {self.name!r}: no file {data_dir / file} nor {data_dir / ARCHIVE}; put the archive of "
            "github.com/idavidrein/gpqa there, without unpacking it"
        )

    def _read(self, path: Path, file: str) -> Any:
        if path.suffix != ".zip":
            return super()._read(path, file)
        name = Path(file).name
        try:
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.namelist() if Path(m).name == name and not m.startswith("__MACOSX")]
                if not members:
                    raise UserError(f"suite {self.name!r}: {path} has no {name} in it; use the authors' archive")
                text = archive.read(members[0], PASSWORD)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:  # RuntimeError: the password
            raise UserError(
                f"suite {self.name!r}: cannot unpack {path} ({first_line(error)}); download it again from "
                f"github.com/idavidrein/gpqa, or unpack it with the password given there to {path.with_name(name)}"
            ) from None
        return dataset_files.load_stream(io.BytesIO(text), ".csv")
