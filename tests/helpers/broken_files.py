"""Broken and hostile files: changes of the files that strangers hand over, each by a name.

A change takes the folder that holds the files and edits one of them. `mutated` changes one value of a file; the tables
have what is wrong with several values together, or with more than a value: `PLANS`, `LINES` and `OTHERS` in a run
directory, `CHECKPOINTS` in a checkpoint, `ROW_FILES` in a line of prompts or conversations.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

Change = Callable[[Path], object]

DEEP = "[" * 100_000 + "]" * 100_000
FAR = 10**12
AR, LOOKUP = "arithmetic.ar.ar.graph.b2", "arithmetic.prompt-lookup-ahead2.ar.graph.b2"  # cells of the run
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**6 + 1, FAR, 10**400, 1e308, float("nan"), float("inf"), [], {}, [1]),
    *("", "odd", "../../outside/x", "/no/such/file", "a\0b", "\x1b[2J", "\ud800", "x" * 10**6),
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of everything inside a document."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def mutated(file: str, number: int) -> Change:
    """Put something else in the place of a value of a JSON file or of a line, leave it out, or repeat it."""

    def change(folder: Path) -> None:
        chance, text = Random(f"{file} {number}"), (folder / file).read_text()
        found = text.splitlines() if file.endswith(".jsonl") else [text]
        which = chance.randrange(len(found))
        document = json.loads(found[which])
        path = chance.choice([*places(document)])
        owner: Any = at(document, path[:-1])
        kind = chance.randrange(len(ODD) + 3)
        if kind < len(ODD):
            owner[path[-1]] = ODD[kind]
        elif isinstance(owner, list) and kind == len(ODD):
            owner.append(copy.deepcopy(at(document, path)))
        else:
            del owner[path[-1]]
        found[which] = json.dumps(document)
        (folder / file).write_text("".join(line + "\n" for line in found))

    return change


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
    "plan: an item that follows a later one": edit(*ITEM, "follows", to=3),
    "plan: an id beyond the vocabulary": edit(*ITEM, "prompt_ids", to=[5, 10_000]),
    "plan: a huge budget": edit(PLAN, "suites", 0, "max_new_tokens", to=10**18),
    "plan: a cell twice in a group": edit(*GROUP, "cells", to=[AR, AR]),
    "plan: a cell in no group": edit(*GROUP, "cells", to=[AR]),
    "plan: two cells of one name": copy_of(PLAN, "cells", entry=0),
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
    "plan: an embedded checkpoint outside": edit(*CELL, "checkpoints", to={"ar": "embedded:tiny/../../.."}),
    "plan: a script of 10^12 tokens": edit(
        *CELL,
        "accept",
        to={"source": "x", "lengths": [FAR] * 4, "seed": 0, "scripts": [[FAR]] * 4, "probabilities": None},
    ),
    "plan: deep nesting inside": with_text(PLAN, '"task": {', f'"task": {{"x": {DEEP}, '),
}

ANSWERS, TIMES = f"generations/{LOOKUP}.jsonl", f"timings/{LOOKUP}.jsonl"

LINES: dict[str, Change] = {
    **_broken_as_a_whole(ANSWERS),
    **_broken_as_a_whole(TIMES),
    "answers: an unknown item": edit_line(ANSWERS, item="arithmetic/999/0"),
    "answers: an item twice": double_line(ANSWERS),
    "answers: a commit of 10^12": edit_line(ANSWERS, commits=[FAR]),
    "answers: other commits than forwards": edit_line(ANSWERS, commits=[1] * 50),
    "answers: more ids than the budget": edit_line(ANSWERS, token_ids=[5] * 100_000),
    "answers: another prompt": edit_line(ANSWERS, prompt_ids=[1, 2, 3]),
    "answers: a text of 10 MB": edit_line(ANSWERS, text="x" * 10**7),
    "times: a session that did not run": edit_line(TIMES, session=99),
    "times: a block twice": double_line(TIMES),
    "times: an infinite wall time": with_text(TIMES, '"wall_s": ', '"wall_s": 1e999, "odd": '),
    "times: steps of 1e308": edit_line(TIMES, step_s=[1e308] * 50),
    "times: more accepted than drafted": edit_line(TIMES, accepted=5, drafted=1, drafts=1),
}

OTHERS: dict[str, Change] = {
    **_broken_as_a_whole("environment.json"),
    **_broken_as_a_whole("failures.jsonl"),
    **_broken_as_a_whole("preparation.jsonl"),
    **_broken_as_a_whole("scores.json"),
    **_broken_as_a_whole("readings.json"),
    **_broken_as_a_whole("memory.json"),
    **_broken_as_a_whole("energy.json"),
    **_broken_as_a_whole(f"lossless/{LOOKUP}.json"),
    "failures: a cell outside": content("failures.jsonl", '{"cell": "../../x", "error": "x"}\n'),
    "preparation: twice 1e308 s": content(
        "preparation.jsonl", f'{{"session": 1, "cell": "{AR}", "preparation_s": 1e308}}\n' * 2
    ),
    "lossless: an index beyond the answer": content(
        f"lossless/{LOOKUP}.json", '{"epsilon": 0.1, "items": {"arithmetic/0/0": {"999999999999": 1.0}}}'
    ),
}

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SETTINGS, RECORD, TEMPLATE = "tokenizer_config.json", "mtbench_training.json", "chat_template.jinja"
GENERATION = "generation_config.json"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
LOOP += "{% endfor %}{% endfor %}{% endfor %}"


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
    "config: one layer more": edits(edit(CONFIG, "num_hidden_layers", to=4), drop(CONFIG, "layer_types")),
    "config: another kind of model": edit(CONFIG, "model_type", to="vit"),
    "config: remote code": edit(CONFIG, "auto_map", to={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}),
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
    "tokenizer: ids of 10^12": edit(TOKENIZER, "model", "vocab", "a", to=FAR),
    "tokenizer: an added token of 10^9": edit(TOKENIZER, "added_tokens", 0, "id", to=10**9),
    "tokenizer: remote code": edit(SETTINGS, "auto_map", to={"AutoTokenizer": ["evil.T", None]}),
    "template: not Jinja": content(TEMPLATE, "{% for %}"),
    "template: nested loops": content(TEMPLATE, LOOP),
    "template: deep nesting": content(TEMPLATE, "{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}"),
    "template: a huge number": content(TEMPLATE, "{{ 10 ** 10 ** 10 }}"),
    "template: an attack": content(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
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
    "a prompt of 10 MB": {"prompt": "a" * 10**7, "completion": "b"},
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
