"""The check of our kernels on the device that runs them, against transformers' modules.

The interpreter and the definitions in PyTorch do not show a kernel's result with a compiler, a driver and a GPU. So
before a model decodes, its logits for few positions over a filled cache are computed three times: by the decoding code,
by transformers' modules with PyTorch's operations, and by these in a wider type. The decoding code must be about as
close to the wide logits as PyTorch is.

R = rows, W = positions fed, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtbench import kernels
from mtbench.errors import UserError, first_line, is_out_of_memory
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache

# R, W: a row, a batch, one that verifies drafts, and one whose programs of attention walk over all keys.
SHAPES = ((1, 1), (16, 1), (16, 7), (16, 33))
SLOTS = 528  # of a row: several spans of keys, the last one partial
FACTOR = {torch.float32: 30.0}  # of PyTorch's error: a GPU's fast exponentials are less exact than PyTorch's
FACTOR_HALF = 3.0  # rounding to the type is most of the error

Inputs = tuple[Tensor, AttentionMetadata, KVCache]
Logits = Callable[[Tensor, AttentionMetadata, KVCache], Tensor]


@torch.inference_mode()
def modules_logits(model: PreTrainedModel, ids: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
    """Return the logits (R, W, V) of transformers' modules."""
    how = {"past_key_values": cache, "use_cache": True, **metadata.arguments(model)}
    logits: Tensor = model(input_ids=ids, position_ids=metadata.positions, **how).logits
    return logits


def plain_logits(model: PreTrainedModel, ids: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
    """Return the same with PyTorch's operations. Raises UserError if the modules do not run."""
    try:
        with kernels.plain():
            return modules_logits(model, ids, metadata, cache)
    except Exception as error:  # modules of unknown architectures
        if is_out_of_memory(error):
            raise
        kernels.refuse_lost_device(error)
        raise UserError(
            f"transformers' modules of {model.config.model_type!r} do not run ({type(error).__name__}: "
            f"{first_line(error)}); give another checkpoint."
        ) from None


class Check:
    """The reference of a model's logits. Needs memory for its largest weight in the wider type."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.failure = model, ""
        self.context = _context(model)
        narrow = [plain_logits(model, *self._inputs(*shape)) for shape in SHAPES]
        try:
            with kernels.plain(), _widened(model, torch.float64 if model.dtype == torch.float32 else torch.float32):
                self.wide = [modules_logits(model, *self._inputs(*shape)) for shape in SHAPES]
            self.error = _largest_error(narrow, self.wide)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an operation may not know the wider type
            self.failure = f"nothing to compare with ({first_line(error)})"

    def fault(self, logits: Logits) -> str | None:
        """Return what is wrong with a function's logits, or None. An exception is a fault too.

        Raises UserError if the GPU can no longer compute.
        """
        if self.failure:
            return self.failure
        try:
            with torch.inference_mode():
                error = _largest_error([logits(*self._inputs(*shape)) for shape in SHAPES], self.wide)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            kernels.refuse_lost_device(failure)
            return f"{type(failure).__name__}: {first_line(failure)}"
        if error <= FACTOR.get(self.model.dtype, FACTOR_HALF) * self.error:
            return None
        return f"logits are wrong by {error:.2g}, and PyTorch's by {self.error:.2g} (relative)"

    def _inputs(self, rows: int, width: int) -> Inputs:
        """Return random ids (R, W), behind contexts of different lengths, and a new cache that holds these."""
        most = self.context.slots
        base = most - width - 37 * torch.arange(rows, device=self.model.device) % (most - width)
        return _fed(self.model, base, width, most, _Filled(self.context))


class _Filled(KVCache):
    """A cache each of whose rows has the keys and values of a context, which its number type holds exactly."""

    def __init__(self, context: KVCache) -> None:
        super().__init__()
        self.context = context

    def storage(self, layer: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        new = layer not in self.layers
        stores = super().storage(layer, *like)
        for store, filled in zip(stores, self.context.layers[layer], strict=True) if new else ():
            store.unflatten(0, (-1, len(filled))).copy_(filled)
        return stores


def _context(model: PreTrainedModel) -> KVCache:
    """Return the keys and values of a row of random tokens, by transformers' modules.

    Noise in their place would do for most models. Some, such as SmolLM2, lose all precision with it: a wrong kernel is
    then not told from a right one.
    """
    config = model.config.get_text_config()
    slots = min(SLOTS, getattr(config, "max_position_embeddings", None) or SLOTS)  # a table of positions may end there
    inputs = _fed(model, _start(model), slots, slots, KVCache())
    plain_logits(model, *inputs)
    return inputs[-1]


def _start(model: PreTrainedModel) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=model.device)


def _fed(model: PreTrainedModel, base: Tensor, width: int, most: int, cache: KVCache) -> Inputs:
    """Return random ids (R, W) for `most` slots of a cache, from `base` (R,) on, their metadata, and the cache."""
    rows, config = len(base), model.config.get_text_config()
    generator = torch.Generator().manual_seed(rows * width)
    ids = torch.randint(config.vocab_size, (rows, width), generator=generator, device="cpu").to(base.device)
    slots = base[:, None] + torch.arange(width, device=base.device)
    metadata = AttentionMetadata(slots, slots, base, most)
    cache.shape(rows, most)
    cache.set_batch(metadata)
    return ids, metadata, cache


def _largest_error(found: list[Tensor], wide: list[Tensor]) -> float:
    """Return the largest relative error of a shape's logits; NaN if one of them is NaN."""
    return float(torch.stack([(a.to(b.dtype) - b).norm() / b.norm() for a, b in zip(found, wide, strict=True)]).max())


@contextmanager
def _widened(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Give each module a copy of its own weights in another type while it runs; only its copy exists then."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype)

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter, parameter.data)

    own = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    hooks = [module.register_forward_pre_hook(widen) for module in own]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_modules(model: PreTrainedModel) -> None:
    """Switch our kernels off if transformers' modules, whose attention they compute, fail the check.

    Raises UserError if the modules do not run.
    """
    if not kernels.ours(model.get_input_embeddings().weight):
        plain_logits(model, *_fed(model, _start(model), 1, 1, KVCache()))
    elif fault := Check(model).fault(partial(modules_logits, model)):
        kernels.switch_off(fault)
