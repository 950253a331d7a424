"""Objectives against references written out by hand, in float64."""

import math
from random import Random
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mtbench.objectives import IGNORE, Ar, Batch, Example, Mars, collate, two_stream_mask

VOCAB, MASK, END, PAD = 23, 20, 21, 22
BLOCKS = (2, 3, 4, 8, 16)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # far from uniform, so that what is seen matters
    )
    return in_float64(Qwen2ForCausalLM(config))


def in_float64(model: Any) -> Any:
    """`model.double()` with norms that stay in float64: Qwen2's own go through float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen2RMSNorm":
                setattr(parent, name, torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon))
    return model.double()


def conversations(seed: int) -> list[Example]:
    """Prompts of one to three turns, an answer each; lengths that no block size divides."""
    rng = Random(seed)
    examples = []
    for turns, answer in ((1, 7), (2, 1), (3, 12), (1, 18)):
        prompt = [rng.randrange(20) for _ in range(sum(rng.randint(1, 6) for _ in range(turns)))]
        reply = [rng.randrange(20) for _ in range(answer)]
        examples.append(Example(prompt + reply, [IGNORE] * len(prompt) + reply))
    return examples


def surprise(model: Any, context: list[int], token: int) -> torch.Tensor:
    """-log p(token) behind `context`, one plain causal forward: no mask, no padding, no second stream."""
    logits: torch.Tensor = model(torch.tensor([context])).logits[0, -1]
    return -logits.log_softmax(-1)[token]


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(model: Any, loss: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(loss, reference, rtol=1e-9, atol=1e-9)
    expected = gradients(model, reference)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("seed", [0, 1])
def test_ar_is_the_mean_surprise_of_all_labelled_tokens(model: Any, seed: int) -> None:
    """Each labelled token is predicted from everything before it; the mean runs over the tokens of the batch."""
    examples = conversations(seed)
    terms = [
        surprise(model, ids[:t], ids[t]) for ids, labels in examples for t in range(len(ids)) if labels[t] != IGNORE
    ]
    loss = Ar()(model, collate(examples, multiple=1, end_id=END, pad_id=PAD)).total
    assert_same(model, loss, torch.stack(terms).mean())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_mars_is_what_one_forward_per_target_gives(model: Any, block: int, seed: int) -> None:
    """Target t is predicted at t-1 from the clean blocks before that position's own and the noisy rest of it."""
    rows = []
    for ids, labels in conversations(seed):
        ends = [END] * (-len(ids) % block)
        ids, labels = ids + ends, labels + ends
        noisy = [token if label == IGNORE else MASK for token, label in zip(ids, labels, strict=True)]
        terms = []
        for t in range(len(ids)):
            if labels[t] == IGNORE:
                continue
            first = (t - 1) // block * block
            terms.append(surprise(model, ids[:first] + noisy[first:t], ids[t]) + surprise(model, ids[:t], ids[t]))
        rows.append(torch.stack(terms).mean())
    mars = Mars(block_size=block, mask_id=MASK)
    batch = collate(conversations(seed), multiple=mars.multiple, end_id=END, pad_id=PAD)
    losses = mars(model, batch)
    assert_same(model, losses.total, torch.stack(rows).mean())
    assert math.isclose(sum(losses.parts.values()), losses.total.item(), rel_tol=1e-12)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_every_query_sees_what_the_paper_allows(block: int, length: int) -> None:
    """Equation 2, position by position: three rules, and clean never sees noisy."""
    sees = two_stream_mask(length, block)
    for query in range(2 * length):
        for key in range(2 * length):
            i, j = query % length, key % length
            match query < length, key < length:
                case True, True:
                    allowed = i // block == j // block and j <= i
                case True, False:
                    allowed = j // block < i // block
                case False, True:
                    allowed = False
                case _:
                    allowed = j <= i
            assert sees[query, key].item() == allowed, (query, key)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_mask_sees_its_block_so_far_and_all_clean_blocks_before(block: int) -> None:
    """Position i of the noisy copy sees i mod B + 1 noisy and i - i mod B clean tokens: i + 1 in all."""
    length = 3 * block + 1
    noisy = two_stream_mask(length, block)[:length]
    assert noisy[:, :length].sum(1).tolist() == [i % block + 1 for i in range(length)]
    assert noisy[:, length:].sum(1).tolist() == [i - i % block for i in range(length)]


def test_only_the_noisy_copy_is_masked_and_only_where_there_are_labels() -> None:
    """The prompt stays visible in the noisy copy, from the first block that a prediction rests on."""
    seen = {}

    def spy(**inputs: Any) -> Any:
        seen.update(inputs)
        return type("Output", (), {"logits": torch.zeros(*inputs["input_ids"].shape, VOCAB)})

    spy.dtype = torch.float32  # type: ignore[attr-defined]
    batch = Batch(torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[IGNORE] * 4 + [5, 6]]))
    Mars(block_size=2, mask_id=MASK)(spy, batch)
    assert seen["input_ids"].tolist() == [[3, 4, MASK, MASK, 1, 2, 3, 4, 5, 6]]
    assert seen["position_ids"].tolist() == [[2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]
    assert (seen["attention_mask"][0, 0] == 0).tolist() == two_stream_mask(6, 2)[2:, 2:].tolist()


def test_end_tokens_fill_a_block_with_loss_and_pad_tokens_fill_the_batch_without() -> None:
    """Three tokens become four by an end token that is learned; what the longest row has more is padding."""
    short, long = Example([1, 2, 3], [IGNORE, 2, 3]), Example([1, 2, 3, 4, 5], [IGNORE, 2, 3, 4, 5])
    batch = collate([short, long], multiple=4, end_id=END, pad_id=PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, END] + [PAD] * 4, [1, 2, 3, 4, 5, END, END, END]]
    assert batch.labels.tolist() == [[IGNORE, 2, 3, END] + [IGNORE] * 4, [IGNORE, 2, 3, 4, 5, END, END, END]]
