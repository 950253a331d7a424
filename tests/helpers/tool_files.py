"""What other tools wrote: reduced copies.

`RECORDED` has what aiperf 0.13.0 wrote when `mtbench load` sent six prompts, five at a time, to
`mtbench serve --family tiny --method mars:tau=0.8 --max-num-seqs 1 --max-queue 1 --max-new-tokens 24`: two answers and
four refusals each. Ids, headers, payloads, tracebacks and connection metrics were taken out.
"""

from pathlib import Path

RECORDED = Path(__file__).parents[1] / "load" / "recorded"
