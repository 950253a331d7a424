"""The roofline model (Williams, Waterman, Patterson, CACM 52/4, 2009): the least time of a forward pass on this GPU.

A forward pass reads the weights and its rows' keys and values, and multiplies. `count` counts bytes and FLOPs from the
model's parameters, `probe` measures the GPU's rates of reads, copies and products, and `floor_s` combines them. Both
are stored with the session, so that results can be computed again without model and GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models.loading import Checkpoint, layer_parameters

COPY_BYTES = 2 << 30  # of each of two buffers, if memory allows
MATMUL_SIZE = 8192
REPETITIONS = 20
WARM_UP_S = 0.3  # for the clocks to rise
NO_GPU = "no GPU: a CPU's caches hold small models, so memory bandwidth is not a bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The reads and computations of a model's forward pass."""

    body: int  # parameters of all layers; embeddings are looked up, not read
    head: int  # parameters of the output embedding, tied or not
    body_bytes: int
    head_bytes: int
    vocabulary: int  # rows of the head
    logit_bytes: int
    kv_bytes_per_token: int  # over all layers
    layers: int
    heads: int
    head_dim: int
    sliding_layers: int  # layers with sliding attention
    sliding_window: int  # their window in tokens

    @property
    def bytes(self) -> int:
        """Bytes of all weights that a forward pass reads."""
        return self.body_bytes + self.head_bytes

    def seen(self, context: float) -> float:
        """Return the cached tokens that a layer reads per row, as a mean over layers."""
        sliding = self.sliding_layers / self.layers
        return (1 - sliding) * context + sliding * min(context, self.sliding_window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The GPU's measured rates."""

    bandwidth_bytes_per_s: float  # read and written by a copy of `copy_bytes`
    matmul_flop_per_s: float  # of a `matmul_size`³ product of random numbers, in the run's type
    copy_bytes: int
    matmul_size: int
    cache_bytes: int  # its L2
    read_bytes_per_s: float | None = None  # by a sum of `copy_bytes`; None: not measured, in older runs

    @property
    def most_bytes_per_s(self) -> float:
        """The highest rate that memory was seen to give. A decode step reads nearly all that it moves."""
        return max(self.bandwidth_bytes_per_s, self.read_bytes_per_s or 0.0)

    def even_positions(self, dtype: torch.dtype) -> float:
        """Return the positions at which multiplying with a weight takes as long as reading it."""
        return self.matmul_flop_per_s / 2 / (self.most_bytes_per_s / dtype.itemsize)


def count(model: Any) -> Shape:
    """Return a model's shape from its parameters and configuration.

    Raises ValueError for a mixture of experts, whose reads depend on the tokens, and for layers of several sizes.
    """
    config = model.config.get_text_config()
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(config, name, None) or 0) > 1:
            raise ValueError("a mixture of experts: which weights a forward reads depends on its tokens")
    if getattr(config, "is_heterogeneous", False):
        raise ValueError("layers of several sizes, which are not counted")
    body, head = layer_parameters(model), model.get_output_embeddings().weight
    turns = getattr(getattr(model, "format", None), "modules", 1)  # modules of a draft, of which a forward runs one
    layers, heads = config.num_hidden_layers // turns, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # as in transformers, a window then applies to every layer
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    return Shape(
        body=sum(p.numel() for p in body) // turns,
        head=head.numel(),
        body_bytes=sum(p.nbytes for p in body) // turns,
        head_bytes=head.nbytes,
        vocabulary=len(head),
        logit_bytes=head.element_size(),
        kv_bytes_per_token=layers * 2 * kv_heads * head_dim * model.dtype.itemsize,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        sliding_layers=kinds[:layers].count("sliding_attention") if window else 0,
        sliding_window=window or 0,
    )


def floor_s(shape: Shape, probe: Probe, *, rows: float, positions: float, judged: float, context: float) -> float:
    """Return the least seconds of one forward pass.

    It feeds `positions` to each of `rows`, each after `context` cached tokens, and computes the logits of the last
    `judged` positions. Body, attention and head run one after another; each takes the time of its bytes or of its
    FLOPs, whichever is longer. Weights and cached keys and values are read once; new ones and logits are written and
    read.
    """
    bandwidth, speed = probe.most_bytes_per_s, probe.matmul_flop_per_s
    fed, logits, seen = rows * positions, rows * judged, shape.seen(context)
    kv_bytes = (rows * seen + 2 * fed) * shape.kv_bytes_per_token
    scores_flop = 4 * shape.layers * shape.heads * shape.head_dim * fed * (seen + positions)
    body = max(shape.body_bytes / bandwidth, 2 * shape.body * fed / speed)
    attention = max(kv_bytes / bandwidth, scores_flop / speed)
    head = max(shape.head_bytes / bandwidth, 2 * shape.head * logits / speed)
    return body + attention + head + 2 * logits * shape.vocabulary * shape.logit_bytes / bandwidth


def described(probed: Probe | None, reason: str | None, checkpoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """Return the roofline entries of environment.json.

    They are the probe, or the reason for none, and the shape of every loaded checkpoint by its source.
    """
    shapes: dict[str, Any] = {}
    for source, checkpoint in checkpoints.items():
        try:
            shapes[source] = asdict(count(checkpoint.model))
        except ValueError as error:
            shapes[source] = {"reason": str(error)}
    return {"probe": None if probed is None else asdict(probed), "probe_reason": reason, "shapes": shapes}


def probe(device: str, dtype: torch.dtype) -> tuple[Probe | None, str | None]:
    """Measure the GPU, in one or two seconds. Without a GPU or enough free memory, return None and the reason."""
    if device != "cuda":
        return None, NO_GPU
    free = torch.cuda.mem_get_info()[0]
    cache_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)
    copy_bytes = min(COPY_BYTES, free // 4)
    if copy_bytes < 4 * cache_bytes:
        return None, f"{free >> 20} MiB of free GPU memory are too few to measure bandwidth beyond the cache"
    try:
        bandwidth, read = copy_rate(torch.device(device), copy_bytes), read_rate(torch.device(device), copy_bytes)
        speed, size = matmul_rate(torch.device(device), dtype, memory=free // 2)
    except torch.OutOfMemoryError:
        return None, "out of memory during the probe"
    finally:
        torch.cuda.empty_cache()
    return (
        Probe(
            bandwidth_bytes_per_s=bandwidth,
            matmul_flop_per_s=speed,
            copy_bytes=copy_bytes,
            matmul_size=size,
            cache_bytes=cache_bytes,
            read_bytes_per_s=read,
        ),
        None,
    )


def copy_rate(device: torch.device, copy_bytes: int) -> float:
    """Return the bytes read and written per second by a copy on the device."""
    source = torch.empty(copy_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(device, lambda: target.copy_(source))


def read_rate(device: torch.device, read_bytes: int) -> float:
    """Return the bytes read per second by a sum on the device."""
    source = torch.empty(read_bytes // 4, dtype=torch.float32, device=device).fill_(1.0)
    return source.nbytes / _median_s(device, source.sum)


def matmul_rate(device: torch.device, dtype: torch.dtype, *, memory: int, size: int = 1024) -> tuple[float, int]:
    """Return the FLOP/s of a square matrix product and its size.

    The size doubles from `size` until a product takes over 4 ms, exceeds MATMUL_SIZE, or exceeds `memory`. Entries are
    random: products of zeros draw less power, so the clock is higher.
    """
    while True:
        a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)

        larger = 2 * size
        fits = larger <= MATMUL_SIZE and 4 * larger**2 * max(4, dtype.itemsize) <= memory  # made in float32
        if not fits or _once_s(device, multiply) > 4e-3:
            return 2 * size**3 / _median_s(device, multiply), size
        size = larger


def _once_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of one `action`, after another one as warm-up."""
    stopwatch = Stopwatch(device)
    action()
    started_at = stopwatch.now()
    action()
    return stopwatch.now() - started_at


def _median_s(device: torch.device, action: Callable[[], object]) -> float:
    laps = sorted(laps_s(device, action, REPETITIONS))
    return laps[len(laps) // 2]


def laps_s(
    device: torch.device, action: Callable[[], object], repetitions: int, warm_up_s: float | None = None
) -> list[float]:
    """Return the device seconds of each repetition of `action`, after a warm-up (default: WARM_UP_S)."""
    stopwatch, warm_up_s = Stopwatch(device), WARM_UP_S if warm_up_s is None else warm_up_s
    started_at = stopwatch.now()
    while stopwatch.now() - started_at < warm_up_s:
        action()
    stopwatch.mark()
    for _ in range(repetitions):
        action()
        stopwatch.mark()
    stopwatch.now()
    return stopwatch.laps()
