"""Broken and hostile files: changes of the files that strangers hand over, each by a name.

A change takes the folder that holds the files and edits one of them. `PLANS`, `LINES`, `OTHERS` and `RESULTS` change a
run directory, `CHECKPOINTS` a checkpoint, `ROW_FILES` a line of prompts or conversations.
"""

import json
import os
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]

DEEP = "[" * 100_000 + "]" * 100_000
FAR = 10**12
AR, LOOKUP = "arithmetic.ar.ar.graph.b2", "arithmetic.prompt-lookup-ahead2.ar.graph.b2"  # cells of the run


def changed(file: str, apply: Callable[[Any], object]) -> Change:
    """Change a JSON file as a document."""

    def change(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        apply(document)
        (folder / file).write_text(json.dumps(document))

    return change


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    return reduce(lambda owner, key: owner[key], path, document)


def edit(file: str, *path: str | int, to: Any) -> Change:
    """Set one value of a JSON file."""
    return changed(file, lambda document: at(document, path[:-1]).__setitem__(path[-1], to))


def drop(file: str, *path: str | int) -> Change:
    """Delete one key or entry of a JSON file."""
    return changed(file, lambda document: at(document, path[:-1]).__delitem__(path[-1]))


def copy_of(file: str, *path: str | int, entry: int) -> Change:
    """Add a copy of an entry to a list in a JSON file."""
    return changed(file, lambda document: at(document, path).append(at(document, path)[entry]))


def edits(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def lines(file: str, apply: Callable[[list[str]], object]) -> Change:
    """Change a JSONL file as a list of lines."""

    def change(folder: Path) -> None:
        found = (folder / file).read_text().splitlines()
        apply(found)
        (folder / file).write_text("".join(line + "\n" for line in found))

    return change


def edit_line(file: str, number: int = 0, **values: Any) -> Change:
    """Set values in one line of a JSONL file."""
    return lines(file, lambda found: found.__setitem__(number, json.dumps(json.loads(found[number]) | values)))


def double_line(file: str) -> Change:
    return lines(file, lambda found: found.append(found[0]))


def content(file: str, data: bytes | str) -> Change:
    return lambda folder: (folder / file).write_bytes(data.encode() if isinstance(data, str) else data)


def instead(file: str, make: Callable[[Path], object]) -> Change:
    """Put something else in the place of a file."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return change


def as_fifo(file: str) -> Change:
    return instead(file, os.mkfifo)


def as_folder(file: str) -> Change:
    return instead(file, Path.mkdir)


def as_link(file: str, target: str) -> Change:
    return instead(file, lambda path: path.symlink_to(target))


def sparse(file: str, size: int) -> Change:
    """A file of zeros that takes no room on the disk."""

    def change(folder: Path) -> None:
        with (folder / file).open("wb") as made:
            made.truncate(size)

    return change


def with_text(file: str, old: str, new: str) -> Change:
    """Replace a text in a file: for what a JSON writer would not write."""

    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return change


def _broken_as_a_whole(file: str) -> dict[str, Change]:
    """What can be wrong with any file, whatever it holds."""
    return {
        f"{file}: empty": content(file, ""),
        f"{file}: not JSON": content(file, "{\n"),
        f"{file}: a list": content(file, "[]\n"),
        f"{file}: null": content(file, "null\n"),
        f"{file}: deep nesting": content(file, DEEP + "\n"),
        f"{file}: not UTF-8": content(file, b'{"a": "\xff\xfe"}\n'),
        f"{file}: a byte order mark": content(file, b"\xef\xbb\xbf{}\n"),
        f"{file}: NaN": content(file, '{"a": NaN}\n'),
        f"{file}: a FIFO": as_fifo(file),
        f"{file}: a folder": as_folder(file),
        f"{file}: a device": as_link(file, "/dev/zero"),
        f"{file}: 1 GB of one line": sparse(file, 1 << 30),
    }


PLAN = "plan.json"
ITEM, CELL, GROUP = (PLAN, "suites", 0, "items", 1), (PLAN, "cells", 0), (PLAN, "groups", 0)

PLANS: dict[str, Change] = {
    **_broken_as_a_whole(PLAN),
    "plan: a block beyond the items": edit(*GROUP, "blocks", 0, to=[0, 99]),
    "plan: an item in two blocks": edit(*GROUP, "blocks", to=[[0, 1], [1, 2]]),
    "plan: a block above the batch size": edit(*GROUP, "blocks", to=[[0, 1, 2, 3]]),
    "plan: two items of one name": edit(*ITEM, "item", to="arithmetic/0/0"),
    "plan: an item that follows itself": edit(*ITEM, "follows", to=1),
    "plan: an item that follows a later one": edit(*ITEM, "follows", to=3),
    "plan: an empty prompt": edit(*ITEM, "prompt_ids", to=[]),
    "plan: an id beyond the vocabulary": edit(*ITEM, "prompt_ids", to=[5, 10_000]),
    "plan: an empty stop string": edit(*ITEM, "stop", to=[""]),
    "plan: a long item name": edit(*ITEM, "item", to="x" * 10**6),
    "plan: a huge budget": edit(PLAN, "suites", 0, "max_new_tokens", to=10**18),
    "plan: an unknown suite": edits(
        edit(PLAN, "suites", 0, "suite", to="nothing"),
        edit(*CELL, "suite", to="nothing"),
        edit(PLAN, "cells", 1, "suite", to="nothing"),
        edit(*GROUP, "suite", to="nothing"),
    ),
    "plan: a private suite": edit(PLAN, "suites", 0, "withheld", to="0" * 64),
    "plan: a group of a suite that has none": edit(*GROUP, "suite", to="gsm8k"),
    "plan: a cell twice in a group": edit(*GROUP, "cells", to=[AR, AR]),
    "plan: a cell in no group": edit(*GROUP, "cells", to=[AR]),
    "plan: two cells of one name": copy_of(PLAN, "cells", entry=0),
    "plan: a cell of another suite": edit(*CELL, "suite", to="gsm8k"),
    "plan: a cell of another batch size": edit(*CELL, "batch_size", to=3),
    "plan: a huge batch size": edits(
        edit(*CELL, "batch_size", to=10**9),
        edit(PLAN, "cells", 1, "batch_size", to=10**9),
        edit(*GROUP, "batch_size", to=10**9),
    ),
    "plan: 10^9 rounds": edit(*GROUP, "rounds", to=[2] * 20_000),
    "plan: a round of 10^9 blocks": edit(*GROUP, "rounds", to=[10**9, 2]),
    "plan: a cell's name leads outside": edits(
        edit(*CELL, "cell", to="../../outside/x"), edit(*GROUP, "cells", 0, to="../../outside/x")
    ),
    "plan: a cell's name has a null byte": edits(edit(*CELL, "cell", to="a\0b"), edit(*GROUP, "cells", 0, to="a\0b")),
    "plan: an option of 10^12": edit(PLAN, "cells", 1, "options", "ahead", to=FAR),
    "plan: an unknown option": edit(PLAN, "cells", 1, "options", "speed", to=2),
    "plan: an unknown method": edit(*CELL, "method", to="magic"),
    "plan: no checkpoint": edit(*CELL, "checkpoints", to={}),
    "plan: a checkpoint that does not exist": edit(*CELL, "checkpoints", to={"ar": "/no/such/folder"}),
    "plan: an embedded checkpoint outside": edit(*CELL, "checkpoints", to={"ar": "embedded:tiny/../../.."}),
    "plan: a random checkpoint of no shape": edit(*CELL, "checkpoints", to={"ar": "random:nothing"}),
    "plan: another engine": edit(*CELL, "engine", to="warp"),
    "plan: a baseline that did not run": edit(PLAN, "cells", 1, "baselines", to=["mars@mars/graph"]),
    "plan: held to nothing": edit(PLAN, "cells", 1, "lossless_reference", to="nothing"),
    "plan: a script of 10^12 tokens": edit(
        *CELL,
        "accept",
        to={"source": "x", "lengths": [FAR] * 4, "seed": 0, "scripts": [[FAR]] * 4, "probabilities": None},
    ),
    "plan: another device": edit(PLAN, "request", "device", to="abacus"),
    "plan: a temperature of -1": edit(PLAN, "request", "temperature", to=-1.0),
    "plan: a seed of 300 digits": edit(PLAN, "request", "seed", to=10**300),
    "plan: NaN inside": with_text(PLAN, '"temperature": 0.0', '"temperature": NaN'),
    "plan: a lone surrogate": with_text(PLAN, '"family": "tiny"', '"family": "\\ud800"'),
    "plan: an escape sequence in a name": edit(PLAN, "suites", 0, "family", to="\x1b[2J"),
    "plan: deep nesting inside": with_text(PLAN, '"task": {', f'"task": {{"x": {DEEP}, '),
}

ANSWERS, TIMES = f"generations/{LOOKUP}.jsonl", f"timings/{LOOKUP}.jsonl"

LINES: dict[str, Change] = {
    **_broken_as_a_whole(ANSWERS),
    **_broken_as_a_whole(TIMES),
    "answers: an unknown item": edit_line(ANSWERS, item="arithmetic/999/0"),
    "answers: a block that is not planned": edit_line(ANSWERS, block=99),
    "answers: an item twice": double_line(ANSWERS),
    "answers: a commit of 10^12": edit_line(ANSWERS, commits=[FAR]),
    "answers: other commits than forwards": edit_line(ANSWERS, commits=[1] * 50),
    "answers: 10^400 forwards": edit_line(ANSWERS, forwards=10**400),
    "answers: an id beyond the vocabulary": edit_line(ANSWERS, token_ids=[10_000]),
    "answers: more ids than the budget": edit_line(ANSWERS, token_ids=[5] * 100_000),
    "answers: no ids": edit_line(ANSWERS, token_ids=[]),
    "answers: another prompt": edit_line(ANSWERS, prompt_ids=[1, 2, 3]),
    "answers: an unknown reason": edit_line(ANSWERS, finish_reason="tired"),
    "answers: a text of 100 MB": edit_line(ANSWERS, text="x" * 10**8),
    "answers: an escape sequence": edit_line(ANSWERS, text="\x1b[2J"),
    "answers: a lone surrogate": with_text(ANSWERS, '"text": "', '"text": "\\ud800'),
    "answers: NaN inside": with_text(ANSWERS, '"block": 0', '"block": NaN'),
    "times: a session that did not run": edit_line(TIMES, session=99),
    "times: a block that is not planned": edit_line(TIMES, block=99),
    "times: a block that round 2 does not repeat": edit_line(TIMES, round=2, block=10**9),
    "times: a block twice": double_line(TIMES),
    "times: a negative wall time": edit_line(TIMES, wall_s=-1.0),
    "times: a wall time of 1e308": edit_line(TIMES, wall_s=1e308),
    "times: an infinite wall time": with_text(TIMES, '"wall_s": ', '"wall_s": 1e999, "odd": '),
    "times: more device than decode time": edit_line(TIMES, device_s=1e6),
    "times: 10^400 tokens": edit_line(TIMES, tokens=10**400),
    "times: steps of 1e308": edit_line(TIMES, step_s=[1e308] * 50),
    "times: more identical than items": edit_line(TIMES, -1, identical=10**6),
    "times: more accepted than drafted": edit_line(TIMES, accepted=5, drafted=1, drafts=1),
}

OTHERS: dict[str, Change] = {
    **_broken_as_a_whole("environment.json"),
    **_broken_as_a_whole("failures.jsonl"),
    **_broken_as_a_whole("preparation.jsonl"),
    **_broken_as_a_whole("scores.json"),
    **_broken_as_a_whole("memory.json"),
    **_broken_as_a_whole("energy.json"),
    **_broken_as_a_whole(f"lossless/{LOOKUP}.json"),
    "environment: a session that is a text": edit("environment.json", "sessions", 0, to="first"),
    "environment: a command of numbers": edit("environment.json", "command", to=[1]),
    "failures: a cell outside": content("failures.jsonl", '{"cell": "../../x", "error": "x"}\n'),
    "failures: an unknown stage": content("failures.jsonl", f'{{"cell": "{AR}", "error": "x", "stage": "dream"}}\n'),
    "preparation: twice 1e308 s": content(
        "preparation.jsonl", f'{{"session": 1, "cell": "{AR}", "preparation_s": 1e308}}\n' * 2
    ),
    "scores: a score of 2": content("scores.json", json.dumps({AR: {"arithmetic/0/0": 2}})),
    "memory: 10^30 bytes": content("memory.json", json.dumps({AR: 10**30})),
    "lossless: an unknown item": content(f"lossless/{LOOKUP}.json", '{"epsilon": 0.1, "items": {"nothing": {}}}'),
    "lossless: an index beyond the answer": content(
        f"lossless/{LOOKUP}.json", '{"epsilon": 0.1, "items": {"arithmetic/0/0": {"999999999999": 1.0}}}'
    ),
}

RESULTS: dict[str, Change] = {
    **_broken_as_a_whole("results.json"),
    "results: no cells": edit("results.json", "cells", to=[]),
    "results: a cell outside": edit("results.json", "cells", 0, "cell", to="../../outside/x"),
    "results: a cell without an arm": drop("results.json", "cells", 0, "arm"),
}


CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SETTINGS, RECORD, TEMPLATE = "tokenizer_config.json", "mtbench_training.json", "chat_template.jinja"
GENERATION = "generation_config.json"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
LOOP += "{% endfor %}{% endfor %}{% endfor %}"
ODD: tuple[Any, ...] = (0, -1, 10**6 + 1, FAR, 10**30, "many", [], None)
SIZES = ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the header of a safetensors file."""

    def apply(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        stored = json.loads(data[8 : 8 + length])
        text = json.dumps(change(stored)).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


def first_weight(**values: Any) -> Change:
    """Set values of the first weight in the header."""

    def change(stored: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in stored if name != "__metadata__")
        return stored | {name: stored[name] | values}

    return header(change)


def _without_one(stored: dict[str, Any]) -> dict[str, Any]:
    left_out = next(name for name in stored if "mlp" in name)
    return {name: entry for name, entry in stored.items() if name != left_out}


def without(file: str) -> Change:
    return lambda folder: (folder / file).unlink(missing_ok=True)


def index_of(**weights: Any) -> Change:
    """Replace the weights by an index."""
    return edits(without(WEIGHTS), content(INDEX, json.dumps({"weight_map": weights})))


def cut_short(file: str, by: int) -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-by])

    return change


CHECKPOINTS: dict[str, Change] = {
    **_broken_as_a_whole(CONFIG),
    **_broken_as_a_whole(WEIGHTS),
    **_broken_as_a_whole(TOKENIZER),
    **_broken_as_a_whole(SETTINGS),
    **_broken_as_a_whole(GENERATION),
    **_broken_as_a_whole(RECORD),
    **{f"config: {name} is {odd!s:.20}": edit(CONFIG, name, to=odd) for name in SIZES for odd in ODD},
    "config: a head of 10^12": edit(CONFIG, "head_dim", to=FAR),
    "config: one layer more": edits(edit(CONFIG, "num_hidden_layers", to=4), drop(CONFIG, "layer_types")),
    "config: an unknown model": edit(CONFIG, "model_type", to="magic"),
    "config: another kind of model": edit(CONFIG, "model_type", to="vit"),
    "config: remote code": edit(CONFIG, "auto_map", to={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}),
    "config: rope of the wrong type": edit(CONFIG, "rope_parameters", to=[1]),
    "config: an unknown activation": edit(CONFIG, "hidden_act", to="magic"),
    "config: a quantization of nothing": edit(CONFIG, "quantization_config", to={"quant_method": "magic"}),
    "config: deep nesting inside": with_text(CONFIG, "{", '{"x": ' + DEEP + ", "),
    "weights: a length beyond the file": content(WEIGHTS, b"\xff" * 8 + b"{}"),
    "weights: cut short": cut_short(WEIGHTS, 100),
    "weights: another shape": first_weight(shape=[1, 2]),
    "weights: a shape of 10^12": first_weight(shape=[FAR, FAR]),
    "weights: offsets beyond the file": first_weight(data_offsets=[0, FAR]),
    "weights: an unknown type": first_weight(dtype="F3"),
    "weights: one weight is missing": header(_without_one),
    "weights: a pickle beside them": content("pytorch_model.bin", b"\x80\x04."),
    "weights: none": without(WEIGHTS),
    "weights: a link to nothing": as_link(WEIGHTS, "/no/such/file"),
    "index: a pickle": edits(content("evil.bin", b"\x80\x04."), index_of(**{"model.norm.weight": "evil.bin"})),
    "index: a path outside": index_of(**{"model.norm.weight": "../outside/x.safetensors"}),
    "index: a missing file": index_of(**{"model.norm.weight": "missing.safetensors"}),
    "index: a FIFO": edits(index_of(**{"model.norm.weight": "x.safetensors"}), as_fifo("x.safetensors")),
    "tokenizer: no model": drop(TOKENIZER, "model"),
    "tokenizer: an empty vocabulary": edit(TOKENIZER, "model", "vocab", to={}),
    "tokenizer: ids of 10^12": edit(TOKENIZER, "model", "vocab", "a", to=FAR),
    "tokenizer: an added token of 10^9": edit(TOKENIZER, "added_tokens", 0, "id", to=10**9),
    "tokenizer: an end token of the wrong type": edit(SETTINGS, "eos_token", to=[1]),
    "tokenizer: remote code": edit(SETTINGS, "auto_map", to={"AutoTokenizer": ["evil.T", None]}),
    "template: not Jinja": content(TEMPLATE, "{% for %}"),
    "template: nested loops": content(TEMPLATE, LOOP),
    "template: deep nesting": content(TEMPLATE, "{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}"),
    "template: a huge number": content(TEMPLATE, "{{ 10 ** 10 ** 10 }}"),
    "template: an attack": content(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template: a FIFO": as_fifo(TEMPLATE),
    "generation: an end token of 10^12": edit(GENERATION, "eos_token_id", to=FAR),
    "record: an option that is a text": edit(RECORD, "options", to={"block_size": "four"}),
    "record: an option of 0": edit(RECORD, "options", to={"block_size": 0}),
}


TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
ROWS: dict[str, Any] = {  # lines of prompts or conversations: values, or the text of a line
    "a list": [],
    "null": None,
    "nothing known": {"x": 1},
    "messages that are a text": {"messages": "a"},
    "messages of numbers": {"messages": [1, 2]},
    "a message without a role": {"messages": [{"content": "a"}, TURNS[1]]},
    "a role that is a list": {"messages": [{"role": [], "content": "a"}, TURNS[1]]},
    "a content that is a number": {"messages": [{"role": "user", "content": 5}, TURNS[1]]},
    "a content of nothing": {"messages": [{"role": "user", "content": ""}, TURNS[1]]},
    "a prompt that is a number": {"prompt": 5, "completion": 6},
    "instances that are a text": {"instruction": "a", "instances": "b"},
    "a prompt of escape sequences": {"prompt": "\x1b[2J", "completion": "\x1b[2J"},
    "a prompt of 100 MB": {"prompt": "a" * 10**8, "completion": "b"},
    "an id that is a list": {"id": [], "prompt": "a", "completion": "b"},
    "an id that leads outside": {"id": "../../x", "prompt": "a", "completion": "b"},
    "deep nesting": DEEP,
    "deep nesting inside": '{"prompt": "a", "completion": "b", "x": ' + DEEP + "}",
    "NaN": '{"prompt": NaN, "completion": NaN}',
    "half a surrogate pair": '{"prompt": "\\ud800", "completion": "b"}',
    "a null byte": '{"prompt": "a\\u0000", "completion": "b"}',
    "not JSON": "{",
    "UTF-16": "\ufeff{".encode("utf-16"),
    "not UTF-8": b'{"prompt": "\xff"}',
}


def rows(line: Any) -> Change:
    """Make `line` the second line of rows.jsonl."""

    def change(folder: Path) -> None:
        data = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        good = json.dumps({"prompt": "a b", "completion": "c d"}).encode()
        (folder / "rows.jsonl").write_bytes(good + b"\n" + data + b"\n")

    return change


ROW_FILES: dict[str, Change] = {f"rows: {name}": rows(line) for name, line in ROWS.items()}
ROW_FILES |= _broken_as_a_whole("rows.jsonl")
