"""Tokens per forward of any tree: python ranks.py MODEL ANSWERS GENERATIONS DRAFT

Greedy decoding accepts a path of the target's own tokens. So the rank of each of them at every step of the draft, from
one pass over prompt and answer, decides what a tree accepts. ANSWERS: what the draft was trained on, GENERATIONS: a
file of a run's folder of that name, DRAFT: a folder that `mtbench train eagle` made with a trimmed vocabulary.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mtbench.models.attention import ATTENTION
from mtbench.models.loading import inspect
from mtbench.training.conversations import prepare
from mtbench.training.draft_objectives import Eagle
from mtbench.training.loss import target_states
from mtbench.training.objectives import Special
from mtbench.training.packing import Example, pack

NEVER = 10**6  # the rank of a token that the draft cannot draft
HELD_OUT, MAX_LENGTH, TOKENS = 24, 768, 8192  # as trained
TREES = ([1, 1], [1, 1, 1], [4, 2, 1], [8, 2, 1], [8, 3, 2], [24, 2, 1], [32, 3], [32, 2, 1], [16, 6, 3, 2])


def ranks(objective: Eagle, model: Any, special: Special, item: Mapping[str, Any]) -> Tensor:
    """Return the rank of each token at each step, (steps + 1, tokens + 1); 0 is the draft's first choice."""
    ids = torch.tensor(item["prompt_ids"] + item["token_ids"])
    sequence = objective.build(Example(ids, len(item["prompt_ids"])), special, torch.Generator())
    batch = pack([[sequence]], -(-len(sequence.ids) // 8) * 8, objective.steps)
    found = torch.full((objective.steps + 1, len(ids) + 1), NEVER)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = target_states(model, batch, objective.taps(model))
        for step, given in enumerate(objective.head_inputs(model, states, batch, None), 1):
            assert given.ids is not None
            logits = (given.hidden.bfloat16() @ given.head.bfloat16().T).float()
            row = torch.searchsorted(given.ids, batch.target[given.rows])  # ids are ascending
            found[step, batch.predictor[given.rows] + 1] = (logits > logits.gather(1, row[:, None])).sum(1)
    return found


def forwards(tree: Sequence[int], rank: Tensor, prompt: int, tokens: int) -> int:
    """Return in how many forwards a tree with so many choices at each depth decodes the answer."""
    last, count = prompt - 1, 0
    while last < tokens - 1:
        depth = 0
        while depth < len(tree) and last + depth + 1 < tokens and rank[depth + 1, last + depth + 1] < tree[depth]:
            depth += 1
        last, count = last + depth + 1, count + 1
    return count


def main(base: str, answers: str, generations: Path, draft: Path) -> None:
    tokenizer = inspect(base, offline=True).tokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation=ATTENTION)
    learned, _ = prepare(answers, None, tokenizer, max_length=MAX_LENGTH, seed=42).split(HELD_OUT)
    objective = Eagle(steps=max(map(len, TREES)), draft_vocabulary=TOKENS)
    special = Special(None, int(tokenizer.eos_token_id), learned)
    objective.attach(model, special)
    stored = load_file(draft / "model.safetensors")
    model.draft.load_state_dict({name: tensor for name, tensor in stored.items() if name != "t2d"})
    model.eval()
    items = [json.loads(line) for line in generations.read_text().splitlines()]
    items = [item for item in items if item.get("token_ids")]
    count = dict.fromkeys(map(str, TREES), 0)
    for item in items:
        rank, prompt = ranks(objective, model, special, item), len(item["prompt_ids"])
        for tree in TREES:
            count[str(tree)] += forwards(tree, rank, prompt, prompt + len(item["token_ids"]))
    committed = sum(len(item["token_ids"]) for item in items)
    print(json.dumps({tree: round(committed / steps, 3) for tree, steps in count.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
