"""Accuracy of the most likely next token on the recipe's held-out conversations: `python next_token.py FOLDER`."""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from mtbench.training.conversations import prepare
from mtbench.training.evaluation import evaluate
from mtbench.training.loss import attach_loss
from mtbench.training.objectives import Ar, Special
from mtbench.training.schedule import Schedule
from mtbench.training.train import _load

torch.set_num_threads(1)
for folder in sorted(Path(sys.argv[1]).glob("*/model.safetensors")):
    checkpoint = folder.parent
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    _, held_out = prepare("arithmetic", 10_512, tokenizer, max_length=512, seed=43).split(512)
    model = _load(str(checkpoint), True)
    attach_loss(model, Ar())
    model.eval()
    special = Special(None, tokenizer.eos_token_id)
    schedule = Schedule(
        examples=held_out, batch_size=512, epochs=1, seed=0, objective=Ar(), special=special, rows=8, packed=0
    )
    print(checkpoint.name, evaluate(model, schedule, torch.device("cpu"))["ahead"])
