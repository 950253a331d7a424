"""Result files of other tools. Those of aiperf, guidellm and lm-eval are reduced copies of what the tools wrote here.

That of vLLM is written after the code that writes it: vllm-project/vllm 009e6d4a, vllm/benchmarks/serve.py

`RECORDED` has what aiperf 0.13.0 and guidellm 0.8.1 wrote when `mtbench load` sent six prompts, five at a time, to
`mtbench serve --family tiny --method mars:tau=0.8 --max-num-seqs 1 --max-queue 1 --max-new-tokens 24`: two answers and
four refusals each. Ids, headers, payloads, tracebacks and connection metrics were taken out.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "imports"
RECORDED = Path(__file__).parents[1] / "load" / "recorded"


def lines(*documents: Any) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


TEXTS = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.json*"))}
VLLM = json.loads(TEXTS["vllm"])
