"""MARS: mask autoregression. Feed masks after the text; accept the leading confident predictions.

Jin, Wang, Luo, Sun: "MARS: Enabling Autoregressive Models Multi-Token Generation", arXiv 2604.07023, section 3.4.
The last known token predicts the next one; B − 1 masks predict those after it. Predictions are accepted from the left
while the confidence reaches τ; the first depends only on real text and is always accepted. `block_size=auto` adapts
the window to recent acceptance (the paper's future work, section 5).

Cache policies (section 4.5 of the paper and its stated future work):
- `cursor`: accepted tokens are fed again, in the forward of the next masks, so that their keys and values are exact.
- `none`: every forward recomputes everything. Tokens, commits and forwards are the same as with `cursor`.
- `block`: the paper's policy. Every forward feeds the rest of a block of `cache_block` positions as masks;
  once all live rows have filled it, one more forward makes its keys and values final.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.options import AUTO, option


@METHODS.register("mars")
@dataclass(frozen=True, kw_only=True)
class Mars(Method):
    """Masks after the text; predictions are accepted from the left while the model is confident."""

    tau: float = option(
        1.0,
        "threshold of the confidence; 1 (of the entropy: 0) = exactly one token per forward",
        low=0.0,
        high=1000.0,
        per_request=True,
    )
    block_size: int = option(4, "B: B-1 masks, B predictions", low=1, trained=True, widths=(2, 4, 8))
    confidence: sampling.Metric = option("probability", "p1 >= tau, entropy <= tau (nats), or p1-p2 >= tau")
    cache: Literal["cursor", "none", "block"] = option("cursor", "what is kept between forwards", same_output=("none",))
    cache_block: int = option(32, "C: positions per block of cache=block", low=1)
    extra: bool = option(False, "feed one mask more and accept up to B+1 tokens")

    title = "MARS"
    roles = ("mars",)
    needs_mask = True
    choices = ("mars:tau=0.95|0.9|0.8",)
    default_arms = ("ar:on=mars", "mars:tau=0.95|0.8|0.5", "mars:tau=0.95,cache=block")

    def __post_init__(self) -> None:
        if self.cache == "block" and self.block_size == AUTO:
            raise UserError("mars: block_size=auto needs cache=cursor or none: cache=block sets the window.")
        if self.cache == "block" and self.extra:
            raise UserError("mars: extra=true needs cache=cursor or none: a block has no position for another mask.")
        if self.tau > 1 and self.confidence != "entropy":
            raise UserError(f"mars: tau={self.tau:g} is not allowed; a {self.confidence} is a number from 0 to 1.")

    @property
    def strict(self) -> float:
        """The threshold that no prediction passes: each forward commits exactly one token."""
        return 0.0 if self.confidence == "entropy" else 1.0

    @property
    def claims(self) -> Literal["lossless", "lossy"]:
        return "lossless" if self.tau == self.strict else "lossy"

    def window(self) -> Window:
        if self.cache == "block":
            return Window(pending=1, guesses=self.cache_block, commits=self.cache_block)
        commits = self.block_size + self.extra
        return Window(pending=None if self.cache == "none" else commits, guesses=commits - 1, commits=commits)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        return {"mask": torch.full_like(rows.prompt_len, mask_id)[:, None], "base": rows.prompt_len.clone()}

    @property
    def own_cursors(self) -> bool:
        return self.cache != "cursor" or type(self) is not Mars

    def base(self, state: State, rows: Rows) -> Tensor:
        return state["base"] if self.cache == "block" else rows.known

    def final(self, state: State, rows: Rows) -> Tensor:
        return torch.zeros_like(rows.known) if self.cache == "none" else rows.known - 1

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """Masks, (R, G); with cache=block they follow the block's known tokens."""
        masks = state["mask"].expand(-1, self.window().guesses)
        if self.cache != "block":
            return masks
        slots = rows.base[:, None] + torch.arange(masks.shape[1], device=masks.device)
        return torch.where(slots < rows.known[:, None], rows.tokens.gather(1, slots), masks)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        several, sure = rows.differs(self, "tau", self.strict), self._sure(rows, output)
        if self.cache == "block":
            return self._accept_in_block(state, rows, output.choice, sure, several)
        sure[:, 0] = True
        offered = (sure.shape[1] - 1) * several
        return Commit(output.choice, sampling.prefix_length(sure), kept=torch.zeros_like(rows.known), offered=offered)

    def _sure(self, rows: Rows, output: TargetOutput) -> Tensor:
        """Return which predictions are confident, (R, G+1) bool; with one token per forward none."""
        return output.sure(self.confidence, rows.option(self, "tau"), never=self.strict)

    def _accept_in_block(self, state: State, rows: Rows, choice: Tensor, sure: Tensor, several: Tensor) -> Commit:
        """Accept from the block's first undecided position on; once every live row is full, keep the block."""
        filled = rows.known - rows.base  # (R,)
        column = torch.arange(self.cache_block, device=filled.device)
        source = (column + filled[:, None]).clamp(max=self.cache_block)
        undecided = column < (self.cache_block - filled)[:, None]
        count = sampling.prefix_length((sure.gather(1, source) | (column == 0)) & undecided)
        full = ((filled == self.cache_block) | rows.done).all()
        state["base"].add_(full * filled)
        offered = (undecided.sum(1) - 1).clamp(min=0) * several
        return Commit(choice.gather(1, source), count, kept=full * filled, offered=offered, columns=source)
