"""The tables of what answers took: the times of a request, and where time and memory went."""

from collections.abc import Mapping, Sequence

from mtbench.document import Entry, Table
from mtbench.document.formatting import NONE, count, joules, listed, memory, number, percent, seconds
from mtbench.report.arm_table import Column, failure, table_of
from mtbench.results.figure_formats import Percentiles, RequestLatency
from mtbench.results.format import ResultCell


def latency_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the times of a request, and what its answer took."""
    columns = [
        Column(
            "request",
            "median, 95th and 99th percentile of the time from the start of a batch to the end of an answer",
            lambda cell: _request_entry(cell.request_latency_s),
            shown=any(cell.request_latency_s is not None for cell in cells),
        ),
        Column(
            "first token",
            "median and 95th percentile of the time to the first token",
            lambda cell: _latency_entry(cell.ttft_s),
        ),
        Column(
            "between commits",
            "median and 95th percentile of the time between two commits of a row",
            lambda cell: _latency_entry(cell.commit_latency_s),
        ),
        Column(
            "cut by budget, %",
            "answers that ended at the token budget, and those of them that end in a loop",
            _cut_entry,
        ),
        Column(
            "target positions per token",
            "positions fed to the target per token of the answers; those of a draft model are not in it",
            lambda cell: Entry(number(cell.positions_fed_per_token)),
        ),
        Column(
            "peak memory",
            "highest use in an untimed pass; on a CPU of the whole process, libraries included",
            lambda cell: Entry(memory(cell.peak_memory_bytes)),
        ),
    ]
    return table_of(columns, cells, numbers, failure)


def cost_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return where time and memory went, and how clean the measurement was."""
    columns = [
        Column("items", "answered items", lambda cell: Entry(count(cell.items))),
        Column(
            "blocks × rounds",
            "blocks with a clean timing, and rounds; later rounds repeat the first blocks",
            lambda cell: Entry(f"{cell.blocks} × {cell.rounds}"),
        ),
        Column(
            "samples dropped",
            "timings that do not count, because the machine was disturbed",
            lambda cell: Entry(f"{cell.samples.dropped} of {cell.samples.used + cell.samples.dropped}"),
        ),
        *_time_columns(cells),
        *_draft_columns(cells),
        Column(
            "KV cache", "most bytes of keys and values that a block needs", lambda cell: Entry(memory(cell.kv_bytes))
        ),
        Column(
            "energy per token",
            "energy of the whole GPU; it includes prompts and idle power",
            lambda cell: Entry(joules(cell.j_per_token)),
        ),
        Column("same tokens again", "repeated requests with the tokens of round 1", _repeated_entry),
    ]
    return table_of(columns, cells, numbers, failure)


def _time_columns(cells: Sequence[ResultCell]) -> list[Column]:
    """Return the columns about seconds of the whole cell."""
    return [
        Column(
            "wall",
            "wall time of all blocks; a block has the mean over its rounds",
            lambda cell: Entry(seconds(cell.wall_s)),
        ),
        Column("prefill", "wall time of reading the prompts", lambda cell: Entry(seconds(cell.prefill_s))),
        Column("decode", "wall time of decoding", lambda cell: Entry(seconds(cell.decode_s))),
        Column("host gap", "decode time less device time", lambda cell: Entry(seconds(cell.host_gap_s))),
        Column(
            "decode tokens/s",
            "tokens per second of decode time",
            lambda cell: Entry(number(cell.decode_tokens_per_s.value)),
        ),
        Column(
            "preparation",
            "time of the first calls beyond that of warm ones: capture, compilation, memory; it is not timed",
            lambda cell: Entry(seconds(cell.preparation_s or None)),
        ),
        Column(
            "% of roofline",
            "least time of its forwards for their weights, keys, values and FLOPs at the measured speeds of the GPU, "
            "over decode time",
            lambda cell: Entry(percent(cell.roofline_fraction)),
            shown=any(cell.roofline_fraction is not None for cell in cells),
        ),
    ]


def _draft_columns(cells: Sequence[ResultCell]) -> list[Column]:
    """Return the columns about what a method computes beyond the target's forwards, if any arm does."""
    return [
        Column(
            "target positions per forward",
            "positions fed to the target per forward; those of a draft model are not in it",
            lambda cell: Entry(number(cell.positions_fed_per_forward)),
        ),
        Column(
            "draft forwards per token",
            "forwards of other models per token, and in all",
            lambda cell: _part_entry(
                cell.draft_forwards, number(cell.draft_forwards_per_token), f"{count(cell.draft_forwards)} in all"
            ),
            shown=any(cell.draft_forwards for cell in cells),
        ),
        Column(
            "draft time",
            "time in forwards of other models",
            lambda cell: _time_entry(cell.draft_s, cell.decode_s),
            shown=any(cell.draft_s for cell in cells),
        ),
        Column(
            "head time",
            "time in what the method computes beside its models",
            lambda cell: _time_entry(cell.head_s, cell.decode_s),
            shown=any(cell.head_s for cell in cells),
        ),
    ]


def gaps(cells: Sequence[ResultCell]) -> list[str]:
    """Return why places of the tables are empty, each reason once, and where a percentile is a single value."""
    answered = [cell for cell in cells if cell.status != "failed"]
    sentences = _reasons("Energy per token", {cell.arm: cell.energy_reason for cell in answered})
    sentences += _reasons("% of roofline", {cell.arm: cell.roofline_reason for cell in answered})
    if any(cell.device == "cpu" and cell.peak_memory_bytes is None for cell in answered):
        sentences.append("Peak memory: on a CPU it is measured only with `--peak-memory`.")
    if any(cell.batching == "refill" for cell in answered):
        sentences.append("Between commits: for refilled slots the step at which a row starts is not stored.")
    if any(cell.samples.used == 1 and cell.ttft_s.p50 is not None for cell in answered):
        sentences.append("First token: one block was timed, so median and 95th percentile are the same sample.")
    return sentences


def _reasons(what: str, reasons: Mapping[str, str | None]) -> list[str]:
    """Return a sentence per reason, with the arms that it holds for unless it holds for all."""
    sentences = []
    for reason in dict.fromkeys(reasons.values()):
        arms = [arm for arm, of_arm in reasons.items() if of_arm == reason]
        if reason and len(arms) == len(reasons):
            sentences.append(f"{what}: {reason}.")
        elif reason:
            sentences.append(f"{what} of {listed(arms)}: {reason}.")
    return sentences


def _latency_entry(spread: Percentiles) -> Entry:
    return Entry() if spread.p50 is None else Entry(seconds(spread.p50), f"p95 {seconds(spread.p95)}")


def _request_entry(latency: RequestLatency | None) -> Entry:
    if latency is None:
        return Entry()
    return Entry(seconds(latency.p50), f"p95 {seconds(latency.p95)}", detail=f"p99 {seconds(latency.p99)}")


def _cut_entry(cell: ResultCell) -> Entry:
    """Return the share of answers that the budget cut, with the part of it that is in loops."""
    if not cell.items:
        return Entry()
    found = cell.degenerate
    loops = f"{percent(found.share)} in a loop" if found is not None and found.answers else None
    return Entry(percent(cell.finish.length / cell.items), detail=loops)


def _repeated_entry(cell: ResultCell) -> Entry:
    share = cell.repeated_identical
    return Entry(NONE if share is None else f"{100 * share:.4g}%")


def _time_entry(part_s: float | None, decode_s: float | None) -> Entry:
    """Return seconds, and their share of decoding."""
    share = f"{percent(part_s / decode_s)}% of decoding" if part_s and decode_s else None
    return _part_entry(part_s, seconds(part_s), share)


def _part_entry(total: float | None, value: str, detail: str | None) -> Entry:
    """Return a value with its detail; 0 without a detail for an arm that has no such part."""
    if total:
        return Entry(value, detail=detail)
    return Entry() if total is None else Entry("0")
