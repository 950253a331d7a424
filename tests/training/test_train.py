"""Training end to end, on models of width 16: what is written, that it goes on where it stopped, and how it stops."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, MistralConfig

from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.training import checkpoint, loss, packing, trainer
from mtbench.training import train as training
from mtbench.training.conversations import prepare
from mtbench.training.init_model import initialise
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Losses, Mars, Medusa, Objective, Special, losses
from mtbench.training.packing import PADDING
from mtbench.training.schedule import Schedule
from mtbench.training.train import train
from mtbench.training.trainer import Settings

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
USUAL = Settings(
    learning_rate=1e-2, epochs=2, batch_size=4, warmup=0.2, max_length=48, dtype="float32", rows=3, save_steps=2
)
COUNT, HELD_OUT, STEPS = 16, 1, 8  # 15 conversations twice, in steps of 4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens are kept in a folder of the test's; one thread, for sums always in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)


def conversation(n: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"{n}?" + " more" * (n % 3)},
        {"role": "assistant", "content": " ".join(str(n + i) for i in range(1 + n % 5))},
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of many lengths, none alike."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(COUNT)))
    return str(file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint."""
    folder = tmp_path_factory.mktemp("base") / "init"
    return str(initialise(map(conversation, range(COUNT)), folder, seed=1, data={}, **SHAPE))


@pytest.fixture(scope="module")
def undisturbed(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(MARS, base, [rows], None, USUAL, tmp_path_factory.mktemp("undisturbed") / "out")


MARS = Mars(block_size=4, timestep_weight=True, random_offset=True)  # of all objectives the one with most randomness


def record(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return told


def losses_of(folder: Path) -> list[float]:
    return [point["loss"] for point in record(folder)["curve"]]


def kept(out: Path) -> Path:
    return out.with_name(out.name + ".training")


def last_checkpoint(out: Path) -> Path | None:
    return max(kept(out).glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]), default=None)


def assert_same_training(out: Path, undisturbed: Path) -> None:
    """To the bit, and nothing is left of what it took."""
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    ours, theirs = record(out), record(undisturbed)
    for name in ("curve", "tokens", "steps", "evaluation", "settings", "data"):
        assert ours[name] == theirs[name], name
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def assert_complete(folder: Path) -> None:
    """A checkpoint that loads, of numbers, with its record."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    expected = {
        "objective",
        "options",
        "settings",
        "data",
        "base",
        "base_sha256",
        "steps",
        "tokens",
        "curve",
        "versions",
    }
    assert expected <= record(folder).keys()


def plan(base: str, rows: str, objective: Objective, settings: Settings = USUAL) -> Schedule:
    """The schedule as it must have been."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = prepare(rows, None, tokenizer, max_length=settings.max_length, seed=settings.seed).examples
    return Schedule(
        examples=examples[: len(examples) - HELD_OUT],
        objective=objective,
        special=Special(tokenizer.mask_token_id, tokenizer.eos_token_id),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        rows=settings.rows,
        packed=0,
    )


class Killed(Exception):
    """In place of a power cut."""


class Watch:
    """Sees what a training tells; raises at a step."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.begun: tuple[int, int] | None = None
        self.steps: list[int] = []
        self.ended = False

    def note(self, text: str) -> None: ...

    def begin(self, steps: int, done: int) -> None:
        self.begun = (steps, done)

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None:
        if step == self.kill_at:
            raise Killed
        self.steps.append(step)

    def end(self) -> None:
        self.ended = True


# --- What comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        Ar(),
        Mars(block_size=4),
        Mars(block_size=3, layout="anchored", ar_weight=0.0, timestep_weight=True),
        BlockDiffusion(block_size=4),
        Draft(),
        Medusa(heads=2),
    ],
    ids=["ar", "mars", "anchored", "block-diffusion", "draft", "medusa"],
)
def test_every_objective_makes_a_checkpoint_that_loads_by_itself(
    base: str, rows: str, tmp_path: Path, objective: Objective
) -> None:
    """In bfloat16, with tokenizer and record; the loss falls; nothing is left beside it."""
    settings = replace(USUAL, epochs=6, batch_size=8, dtype="bfloat16")
    watch = Watch()
    out = train(objective, base, [rows], None, settings, tmp_path / "out", progress=watch)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template(conversation(3), return_tensors="pt", return_dict=False)
    assert model(ids).logits.isfinite().all()
    assert model.dtype == torch.bfloat16
    assert tokenizer.mask_token == "<|mask|>"
    assert list(tmp_path.iterdir()) == [out]

    told = record(out)
    assert (told["objective"], told["options"]) == (objective.name, asdict(objective))
    assert told["settings"] == asdict(settings)
    assert told["steps"] == 12
    for point in told["curve"]:
        assert math.isclose(sum(point[name] for name in objective.parts), point["loss"], abs_tol=1e-5)
    curve = losses_of(out)
    assert sum(curve[-3:]) < sum(curve[:3])
    assert told["evaluation"]["conversations"] == HELD_OUT
    assert (watch.begun, watch.steps, watch.ended) == ((12, 0), list(range(1, 13)), True)


def test_medusa_leaves_its_target_as_it_is(base: str, rows: str, tmp_path: Path) -> None:
    """Bit for bit; the heads stand beside it, and have learned something."""
    out = train(Medusa(heads=2), base, [rows], None, USUAL, tmp_path / "out")
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    heads = load_file(out / "medusa.safetensors")
    assert {name.partition(".")[0] for name in heads} == {"0", "1"}
    assert all(heads[f"{k}.hidden.weight"].any() for k in range(2))


def test_a_draft_comes_closer_to_its_teacher(base: str, rows: str, undisturbed: Path, tmp_path: Path) -> None:
    """The divergence from the teacher's distribution falls; it is 0 for the teacher itself."""
    settings = replace(USUAL, epochs=8)
    out = train(Draft(distil="logits"), base, [rows], None, settings, tmp_path / "out", teacher=str(undisturbed))
    curve = losses_of(out)
    assert sum(curve[-4:]) < 0.5 * sum(curve[:4])
    assert record(out)["teacher_sha256"] == checkpoint.weights_sha256(undisturbed)
    same = train(
        Draft(distil="logits"), str(undisturbed), [rows], None, USUAL, tmp_path / "same", teacher=str(undisturbed)
    )
    assert losses_of(same)[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("out", ["a", "b"])
def test_the_same_command_makes_the_same_weights(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, out: str
) -> None:
    """Training is a function of what is asked. Another seed is another training."""
    if out == "a":
        assert_same_training(train(MARS, base, [rows], None, USUAL, tmp_path / out), undisturbed)
    else:
        other = train(MARS, base, [rows], None, replace(USUAL, seed=20261121), tmp_path / out)
        assert losses_of(other) != losses_of(undisturbed)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({"rows": 1}, 1e-5), ({"rows": 8}, 1e-5), ({"pack": 120}, 1e-5), ({"checkpointing": True}, 1e-6)],
    ids=str,
)
def test_how_memory_is_saved_changes_no_loss(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    """Rows of a forward, packing and recomputed activations give the same curve."""
    out = train(MARS, base, [rows], None, replace(USUAL, **changes), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=tolerance * 10)
    assert record(out)["tokens"] == record(undisturbed)["tokens"]


def test_bfloat16_arithmetic_comes_near(base: str, rows: str, undisturbed: Path, tmp_path: Path) -> None:
    """Weights and optimizer stay in float32."""
    out = train(MARS, base, [rows], None, replace(USUAL, precision="bfloat16"), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), rel=0.02)
    assert losses_of(out) != losses_of(undisturbed)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


# --- What the record says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", [3, 7, STEPS])
def test_checkpoints_on_the_way_tell_how_they_were_made(base: str, rows: str, tmp_path: Path, kill_at: int) -> None:
    """Objective, options, data, base, versions and seed as in the end; tokens as counted from the schedule."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        train(MARS, base, [rows], None, USUAL, out, progress=Watch(kill_at))
    found = last_checkpoint(out)
    assert found is not None
    assert_complete(found)
    told, done, schedule = record(found), int(found.name.partition("-")[2]), plan(base, rows, MARS)
    assert done == (kill_at - 1) // 2 * 2
    assert told["objective"] == "mars"
    assert told["options"] == asdict(MARS)
    assert told["settings"]["seed"] == 42
    assert told["base_sha256"] == checkpoint.weights_sha256(Path(base))
    assert (
        told["data"]["sha256"] == prepare(rows, None, AutoTokenizer.from_pretrained(base), max_length=48, seed=0).sha256
    )
    assert {"torch", "transformers", "multi-token-bench"} <= told["versions"].keys()
    batches = [schedule[number] for number in range(done * schedule.forwards)]
    assert told["tokens"] == {
        "fed": sum(int((batch["document"] != PADDING).sum()) for batch in batches),
        "predicted": sum(len(batch["at"]) for batch in batches),
        "conversations": sum(len(schedule.conversations(step)) for step in range(done)),
    }
    assert [point["step"] for point in told["curve"]] == list(range(1, done + 1))


def test_a_long_training_is_told_in_fifty_points_or_more(base: str, rows: str, tmp_path: Path) -> None:
    """The last step's among them, even of a training killed when all that was left was to write it out."""
    settings, out = replace(USUAL, batch_size=1, epochs=7, save_steps=None), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_checkpoint", broken_after(None, 0))
        with pytest.raises(Killed):
            train(Ar(), base, [rows], None, settings, out)
    told = record(train(Ar(), base, [rows], None, settings, out))
    assert told["steps"] == 105
    assert [point["step"] for point in told["curve"]] == [*range(2, 105, 2), 105]
    assert told["tokens"]["conversations"] == 105
    rates = [point["learning_rate"] for point in told["curve"]]
    assert rates[0] == pytest.approx(1e-2 / 21)  # of step 2, the second of 21 that warm up
    assert 0 < rates[-1] < 1e-5


def test_learning_rates_are_those_the_steps_were_made_with(undisturbed: Path) -> None:
    """From 0 up to the peak in a fifth of the steps, then along a cosine."""
    rates = [point["learning_rate"] for point in record(undisturbed)["curve"]]
    warm = math.ceil(0.2 * STEPS)
    cosine = [0.5 * (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) for step in range(warm, STEPS)]
    assert rates == pytest.approx([1e-2 * x for x in [*(step / warm for step in range(warm)), *cosine]])


# --- Going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", range(1, STEPS + 1))
def test_killed_at_any_step_and_resumed_it_is_the_undisturbed_training(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, kill_at: int
) -> None:
    """Curve, tokens and weights, to the bit; what was saved is not done again."""
    out, watch = tmp_path / "out", Watch()
    with pytest.raises(Killed):
        train(MARS, base, [rows], None, USUAL, out, progress=Watch(kill_at))
    assert not out.exists()
    assert_same_training(train(MARS, base, [rows], None, USUAL, out, progress=watch), undisturbed)
    saved = (kill_at - 1) // 2 * 2
    assert (watch.begun, watch.steps) == ((STEPS, saved), list(range(saved + 1, STEPS + 1)))


KILLING = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from mtbench.training.objectives import Mars
from mtbench.training.train import train
from mtbench.training.trainer import Settings

torch.set_num_threads(1)
base, rows, out, settings, options = json.loads(sys.argv[1])

def start():
    pid = os.fork()
    if pid:
        return pid
    try:
        train(Mars(**options), base, [rows], None, Settings(**settings), Path(out))
    finally:
        os._exit(0)

def done():
    return max((int(f.name[11:]) for f in Path(out + ".training").glob("checkpoint-*")), default=0)

random.seed(0)
for goal in (0, 2, 5, 9, 10, 20, 33, 44):
    pid = start()
    while not Path(out + ".training").exists() or done() < goal:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(done(), flush=True)
if not Path(out).exists():
    os.waitpid(start(), 0)
"""


@pytest.mark.slow
def test_killed_at_random_moments_it_is_the_undisturbed_training(base: str, rows: str, tmp_path: Path) -> None:
    """By SIGKILL, which nothing can catch, eight times: in a step, while saving, before the first one."""
    settings = replace(USUAL, epochs=12, save_steps=1)
    undisturbed = train(MARS, base, [rows], None, settings, tmp_path / "undisturbed" / "out")
    out = tmp_path / "killed" / "out"
    asked = json.dumps([base, rows, str(out), asdict(settings), asdict(MARS)])
    told = subprocess.run(
        [sys.executable, "-c", KILLING, asked], capture_output=True, text=True, check=True, timeout=300
    )
    assert len(set(told.stdout.splitlines())) > 5, told.stdout + told.stderr
    assert_same_training(out, undisturbed)


def broken_after(function: Any, times: int) -> Any:
    """It works so many times, then never again."""
    calls = iter(range(times))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return function(*args, **kwargs)

    return broken


@pytest.mark.parametrize(
    ("where", "what", "times"),
    [
        (torch, "save", 0),  # the first checkpoint's optimizer
        (torch, "save", 4),  # that of a later one
        (trainer, "write_record", 0),
        (trainer, "write_record", 2),
        (Path, "rename", 0),
        (Path, "rename", 2),
        (shutil, "rmtree", 0),
        (shutil, "rmtree", 2),
        (Path, "rename", 4),  # of the finished checkpoint
        (checkpoint, "write_record", 0),
        (training, "write_checkpoint", 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_checkpoint_is_complete_or_absent(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, where: Any, what: str, times: int
) -> None:
    """Killed while writing, moving or removing one, the last is there, and the same command finishes."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, what, broken_after(getattr(where, what), times))
        with pytest.raises(Killed):
            train(MARS, base, [rows], None, USUAL, out)
    for folder in kept(out).glob("checkpoint-*"):
        if folder == last_checkpoint(out):
            assert_complete(folder)
    if out.exists():  # it was made whole, then what it took could not be removed
        assert_complete(out)
        return
    assert_same_training(train(MARS, base, [rows], None, USUAL, out), undisturbed)


def test_what_a_killed_training_left_half_written_does_no_harm(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """Neither `out.partial` nor `writing`."""
    out = tmp_path / "out"
    for folder in (out.with_name("out.partial"), kept(out) / "writing" / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("half")
        (folder / "stale").write_text("")
    assert_same_training(train(MARS, base, [rows], None, USUAL, out), undisturbed)
    assert not (out / "stale").exists()


@pytest.mark.parametrize(
    ("changes", "objective", "what"),
    [
        ({"learning_rate": 2e-2}, MARS, "settings.learning_rate was 0.01, not 0.02"),
        ({"held_out": 3}, MARS, "settings.held_out was 512, not 3"),
        ({"seed": 1}, MARS, "settings.seed was 42, not 1"),
        ({}, replace(MARS, block_size=5), "options.block_size was 4, not 5"),
        ({}, Ar(), 'objective was "mars", not "ar"'),
        ({"max_length": 20}, MARS, "settings.max_length was 48, not 20"),
    ],
    ids=str,
)
def test_asked_otherwise_an_interrupted_training_is_not_touched(
    base: str, rows: str, tmp_path: Path, changes: dict[str, Any], objective: Objective, what: str
) -> None:
    """One line names what differs; every file stays as it was."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        train(MARS, base, [rows], None, USUAL, out, progress=Watch(4))
    before = {path: path.read_bytes() for path in kept(out).rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refusal:
        train(objective, base, [rows], None, replace(USUAL, **changes), out)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert {path: path.read_bytes() for path in kept(out).rglob("*") if path.is_file()} == before


def test_other_data_and_another_base_are_told_apart(base: str, rows: str, undisturbed: Path, tmp_path: Path) -> None:
    """By what is in them, even where names are the same."""
    out, file, start = tmp_path / "out", tmp_path / "rows.jsonl", tmp_path / "base"
    shutil.copy(rows, file)
    shutil.copytree(base, start)
    with pytest.raises(Killed):
        train(MARS, str(start), [str(file)], None, USUAL, out, progress=Watch(2))
    shutil.copy(undisturbed / "model.safetensors", start)
    with pytest.raises(UserError, match="base_sha256 was"):
        train(MARS, str(start), [str(file)], None, USUAL, out)
    shutil.copy(Path(base) / "model.safetensors", start)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(UserError, match=r"data\.sha256 was"):
        train(MARS, str(start), [str(file)], None, USUAL, out)


def test_an_existing_folder_is_never_overwritten(base: str, rows: str, undisturbed: Path) -> None:
    """`--out` must be new."""
    before = (undisturbed / RECORD).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        train(MARS, base, [rows], None, USUAL, undisturbed)
    assert (undisturbed / RECORD).read_bytes() == before


# --- Stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_of_a_forward", [1, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_no_number_stops_with_step_rate_and_conversations(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_forward: int, value: float
) -> None:
    """One poisonous conversation is found out; what was saved stays good, and the same command stops there again."""
    settings, out = replace(USUAL, rows=rows_of_a_forward, save_steps=1), tmp_path / "out"
    schedule = plan(base, rows, Ar(), settings)
    poisonous = schedule.conversations(2)[1]
    text = schedule.examples[poisonous].ids
    lay = Ar.build

    def poisoned(self: Ar, example: packing.Example, *rest: Any) -> packing.TrainingSequence:
        laid = lay(self, example, *rest)
        return laid._replace(weight=laid.weight * value) if torch.equal(example.ids, text) else laid

    monkeypatch.setattr(Ar, "lay", poisoned)
    forward = next(n for n in range(schedule.forwards) if poisonous in schedule.conversations(2, n))
    named = ", ".join(map(str, schedule.conversations(2, forward)))
    assert (named == str(poisonous)) == (rows_of_a_forward == 1)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            train(Ar(), base, [rows], None, settings, out)
        assert f"the loss of step 3 is {value}, at a learning rate of 0.01, on conversations {named};" in str(
            error.value
        )
        assert "\n" not in str(error.value)
        assert not out.exists()
        assert [folder.name for folder in kept(out).glob("checkpoint-*")] == ["checkpoint-2"]
        assert_complete(kept(out) / "checkpoint-2")


@pytest.mark.parametrize(("step", "save_steps", "left"), [(4, 2, "checkpoint-2"), (STEPS, 3, "checkpoint-6")])
def test_a_gradient_that_is_no_number_stops_before_it_is_saved(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, save_steps: int, left: str
) -> None:
    """Even where the loss still was one: the weights are lost all the same. In the last step too."""
    out = tmp_path / "out"
    schedule = plan(base, rows, Ar())
    forwards = iter(range(10_000))

    def steep(objective: Objective, model: Any, *rest: Any) -> Losses:
        total, parts = losses(objective, model, *rest)
        if model.training and next(forwards) == (step - 1) * schedule.forwards:
            total = total + (total - total.detach()).sqrt()  # 0, with an infinite slope
        return Losses(total, parts)

    monkeypatch.setattr(loss, "losses", steep)
    with pytest.raises(UserError, match=f"the gradient of step {step} is (inf|nan), at a learning rate of") as error:
        train(Ar(), base, [rows], None, replace(USUAL, save_steps=save_steps), out)
    assert f"on conversations {', '.join(map(str, schedule.conversations(step - 1)))};" in str(error.value)
    found = last_checkpoint(out)
    assert found is not None
    assert found.name == left
    assert_complete(found)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"rows": 6}, "--rows 3"),
        ({"rows": 1, "pack": 200}, "--pack 100"),
        ({"rows": 1, "pack": 110}, "--checkpointing"),
        ({"rows": 1}, "add `--checkpointing`, or halve `--max-length 48`"),
        ({"rows": 1, "checkpointing": True}, "; halve `--max-length 48`"),
    ],
    ids=str,
)
def test_out_of_memory_says_what_to_halve(
    base: str,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    changes: dict[str, Any],
    advice: str,
) -> None:
    """First what changes no loss; a packed row still holds the longest conversation."""
    monkeypatch.setattr(loss, "hidden_states", broken_by(error))
    with pytest.raises(UserError, match="out of memory") as told:
        train(Mars(block_size=2), base, [rows], None, replace(USUAL, **changes), tmp_path / "out")
    assert advice in str(told.value)


def broken_by(error: Exception) -> Any:
    def broken(*_: Any) -> Any:
        raise error

    return broken


def test_another_error_is_not_taken_for_want_of_memory(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes through as it is."""
    monkeypatch.setattr(loss, "hidden_states", broken_by(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(Ar(), base, [rows], None, USUAL, tmp_path / "out")


def test_after_want_of_memory_the_advice_is_taken_and_nothing_lost(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training goes on with fewer rows a forward, on the same curve, and its record says so."""
    out, forward = tmp_path / "out", loss.hidden_states
    calls = iter(range(1000))

    def short(model: Any, batch: Any) -> Any:
        if next(calls) == 5 * 2 + 1:
            raise OUT_OF_MEMORY[0]
        return forward(model, batch)

    monkeypatch.setattr(loss, "hidden_states", short)
    with pytest.raises(UserError, match="--rows 1`"):
        train(MARS, base, [rows], None, USUAL, out)
    watch = Watch()
    train(MARS, base, [rows], None, replace(USUAL, rows=1), out, progress=watch)
    assert watch.begun == (STEPS, 4)
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=1e-5)
    assert record(out)["settings"]["rows"] == 1


# --- Which models -------------------------------------------------------------------------------------------------


def saved(folder: Path, base: str, config: Any) -> str:
    """A random model with the base's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def test_a_model_that_does_more_to_its_logits_is_refused(base: str, rows: str, tmp_path: Path) -> None:
    """Its loss would be another than training's. In one line, and nothing is written."""
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=1.0, initializer_range=0.5)
    gemma = saved(tmp_path / "gemma", base, config)
    with pytest.raises(UserError, match=r"does more to its logits than one matrix \(gemma2\)") as error:
        train(Ar(), gemma, [rows], None, USUAL, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["gemma"]


def test_layers_with_a_sliding_window_learn_under_it(base: str, rows: str, tmp_path: Path) -> None:
    """The loss before the first step is that of transformers' own attention on each conversation alone."""
    config = MistralConfig(**SHAPE, sliding_window=5, initializer_range=0.5, eos_token_id=None, bos_token_id=None)
    mistral = saved(tmp_path / "mistral", base, config)
    settings = replace(USUAL, batch_size=COUNT - HELD_OUT, epochs=1, pack=96)
    out = train(Ar(), mistral, [rows], None, settings, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(mistral, attn_implementation="eager")
    schedule = plan(mistral, rows, Ar(), settings)
    surprises = []
    with torch.no_grad():
        for example in schedule.examples:
            log_p = model(example.ids[None]).logits[0].log_softmax(1)
            surprises += [-log_p[t - 1, example.ids[t]] for t in range(example.prompt, len(example.ids))]
    assert losses_of(out) == pytest.approx([torch.stack(surprises).mean().item()], abs=1e-5)
    assert max(len(example.ids) for example in schedule.examples) > 10


def test_a_row_too_short_for_a_conversation_is_refused(base: str, rows: str, tmp_path: Path) -> None:
    """Before anything is read, with the least that would do."""
    with pytest.raises(
        UserError, match="cannot hold a conversation of 48, for which mars feeds up to 93; give `--pack 93`"
    ):
        train(Mars(), base, [rows], None, replace(USUAL, pack=64), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_teacher_must_be_asked_for_and_speak_the_same_tokens(base: str, rows: str, tmp_path: Path) -> None:
    """Neither too much nor too little: a token id must mean the same to both."""
    with pytest.raises(UserError, match="learns from no teacher"):
        train(Draft(), base, [rows], None, USUAL, tmp_path / "out", teacher=base)
    with pytest.raises(UserError, match="draft needs `--teacher CHECKPOINT`"):
        train(Draft(distil="logits"), base, [rows], None, USUAL, tmp_path / "out")
    talk = [[{"role": "user", "content": "wholly other words"}, {"role": "assistant", "content": "words other"}]] * 3
    other = initialise(talk, tmp_path / "other", seed=1, data={}, **SHAPE)
    with pytest.raises(UserError, match="the teacher's tokenizer gives"):
        train(Draft(distil="logits"), base, [rows], None, USUAL, tmp_path / "out", teacher=str(other))


def test_a_teacher_may_have_more_rows_of_padding(base: str, rows: str, tmp_path: Path) -> None:
    """As Qwen2.5 has from 7B on: ids that no token stands for are left out."""
    teacher = AutoModelForCausalLM.from_pretrained(base)
    rows_of_base = teacher.get_input_embeddings().weight.shape[0]
    teacher.resize_token_embeddings(rows_of_base + 16, mean_resizing=False)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "teacher")
    out = train(Draft(distil="logits"), base, [rows], None, USUAL, tmp_path / "out", teacher=str(tmp_path / "teacher"))
    assert losses_of(out)[0] == pytest.approx(0, abs=1e-5)
    with pytest.raises(UserError, match=f"has {rows_of_base} ids, fewer than the {rows_of_base + 16} of the base"):
        train(Draft(distil="logits"), str(tmp_path / "teacher"), [rows], None, USUAL, tmp_path / "no", teacher=base)
