"""Whether the tokens of an arm are those that it promises, and whether a prefix cache changes them, as records."""

from typing import Annotated

from pydantic import Field

from mtbench.plan.formats import Grade
from mtbench.records import Count, Record, Size

JUDGE = "transformers"  # that an arm of a serving engine is held to where no other arm is


class Floor(Record):
    """How far the arm that a promise is held to agrees with itself at two batch sizes: the effect of batching alone."""

    arm: str = Field(description="arm that the promise is held to")
    batch_sizes: Annotated[list[Size], Field(min_length=2, max_length=2)] = Field(
        description="smallest and largest batch size"
    )
    items: Size = Field(description="items that both batch sizes answered")
    identical: Count = Field(description="items with the same tokens")


class PrefixCache(Record):
    """Whether an arm's prefix cache changes answers."""

    probes: Count = Field(description="prompts that were asked with the cache, and twice without")
    equal: Count = Field(description="of these, those with the same answers")
    noise: Count = Field(description="of these, those whose two answers without the cache differ")
    faults: list[str] = Field(description="answers that it changes, and counts of cached tokens that cannot be")
    text: str = Field(description="the result in words")


class Lossless(Record):
    """How an arm keeps its promise of another arm's tokens."""

    against: str = Field(description=f"arm whose tokens it promises; {JUDGE}: none, so its choices are the judge's")
    grade: Grade = Field(
        description="exact: the same tokens; near-tie: other tokens, each within epsilon of the largest logit; "
        "divergent: a token that is no near tie; inconclusive: other tokens, and nothing to judge them by"
    )
    items: Count = Field(description="items that both answered")
    identical: Count = Field(description="items with the same tokens")
    first_divergence: Count | None = Field(description="earliest index of a token that differs; null: none differs")
    epsilon: float | None = Field(description="logit difference that still counts as a tie; null: not known")
    worst_margin: float | None = Field(description="largest distance of a token's logit below the largest logit")
    near_ties: float | None = Field(description="share of the tokens that are not the judge's choice")
    floor: Floor | None = Field(description="agreement of that arm with itself; null: one batch size")
    why: str | None = Field(None, description="why it could not be re-scored, or what an audit found; null: neither")
