"""The factors of a speed: tokens per second as an exact product, and its ratio to a baseline's as one."""

from typing import NamedTuple


class Totals(NamedTuple):
    """An arm's counters and times: sums over blocks of the block's mean over its valid rounds."""

    tokens: float
    row_forwards: float  # one for each live row of each forward pass
    batch_forwards: float  # forward passes
    row_slots: float  # one for each row of each forward pass, live or idle
    device_s: float  # in forward passes: device time; on a CPU time inside the model
    decode_s: float  # wall time of decoding, without prefill
    wall_s: float


class Parts(NamedTuple):
    """tokens per second = tokens_per_forward · rows · utilisation · host · decode_share / forward_s, exactly."""

    tokens_per_forward: float
    rows: float  # R, mean rows per forward pass: the batch size, or less if the last static block is short
    utilisation: float  # u, live share of the rows; rows missing from a short block do not count as idle
    forward_s: float  # t, device time per forward pass
    host: float  # g, device time / decode time = 1 − host gap
    decode_share: float  # d, decode time / wall time


class Factors(NamedTuple):
    """rate_ratio = product of these factors, exactly. speedup = rate_ratio / length_ratio."""

    tokens_per_forward: float
    forward_time: float  # the baseline's forward_s / the arm's
    utilisation: float  # ratio of rows · utilisation, live rows per forward pass
    host: float
    decode_share: float


def parts(totals: Totals) -> Parts | None:
    """Return the parts of an arm's tokens per second; None if a counter is 0."""
    if min(totals) <= 0:
        return None
    return Parts(
        tokens_per_forward=totals.tokens / totals.row_forwards,
        rows=totals.row_slots / totals.batch_forwards,
        utilisation=totals.row_forwards / totals.row_slots,
        forward_s=totals.device_s / totals.batch_forwards,
        host=totals.device_s / totals.decode_s,
        decode_share=totals.decode_s / totals.wall_s,
    )


def factors(arm: Totals, baseline: Totals) -> Factors | None:
    """Return the factors of the arm's tokens per second over the baseline's; None if a counter is 0."""
    x, x0 = parts(arm), parts(baseline)
    if x is None or x0 is None:
        return None
    return Factors(
        tokens_per_forward=x.tokens_per_forward / x0.tokens_per_forward,
        forward_time=x0.forward_s / x.forward_s,
        utilisation=x.rows * x.utilisation / (x0.rows * x0.utilisation),
        host=x.host / x0.host,
        decode_share=x.decode_share / x0.decode_share,
    )
