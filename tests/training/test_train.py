"""Training end to end, on models of width 16: what is written, how it resumes, and how it stops."""

import gc
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GPT2Config, MistralConfig

from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.drafts.loading import load_draft
from mtbench.models.families import RECORD
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.training import checkpoint, draft_objectives, loss, packing, trainer
from mtbench.training import train as training
from mtbench.training.conversations import prepare
from mtbench.training.draft_objectives import BlockDraft, DraftObjective, Eagle, MarkovBlockDraft, Mtp
from mtbench.training.init_model import initialise
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Losses, Mars, Medusa, Objective, Special
from mtbench.training.packing import PADDING
from mtbench.training.schedule import Schedule
from mtbench.training.train import TrainingRequest, check, train
from mtbench.training.trainer import Progress, Settings

pytestmark = pytest.mark.whole

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
    """A token cache of its own; one thread, so that sums always have the same order.

    The Trainer collects garbage at the start of each training. Frozen objects, those of all imports, are left out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def conversation(n: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"{n}?" + " more" * (n % 3)},
        {"role": "assistant", "content": " ".join(str(n + i) for i in range(1 + n % 5))},
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of many lengths, no two equal."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(COUNT)))
    return str(file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint."""
    folder = tmp_path_factory.mktemp("base") / "init"
    return str(initialise(map(conversation, range(COUNT)), folder, seed=1, data={}, **SHAPE))


MARS = Mars(block_size=4, timestep_weight=True, random_offset=True)  # of all objectives the one with most randomness


def requested(
    objective: Objective, base: str, rows: str, settings: Settings, out: Path, **more: Any
) -> TrainingRequest:
    return TrainingRequest(objective=objective, base=base, data=(rows,), settings=settings, out=out, **more)


def run(
    objective: Objective,
    base: str,
    rows: str,
    settings: Settings,
    out: Path,
    progress: Progress | None = None,
    teacher: str | None = None,
) -> Path:
    return train(requested(objective, base, rows, settings, out, teacher=teacher), progress)


@pytest.fixture(scope="module")
def undisturbed(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training without interruption."""
    return run(MARS, base, rows, USUAL, tmp_path_factory.mktemp("undisturbed") / "out")


@pytest.fixture(scope="module")
def interrupted(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Path], Path]:
    """Return a function that puts a training killed at a step into a folder. Each one is made once."""
    made: dict[int, Path] = {}

    def copy(kill_at: int, folder: Path) -> Path:
        if kill_at not in made:
            out = tmp_path_factory.mktemp("interrupted") / "out"
            with pytest.raises(Killed):
                run(MARS, base, rows, USUAL, out, progress=Watch(kill_at))
            assert not out.exists()
            made[kill_at] = out
        out = folder / "out"
        shutil.copytree(resume_folder(made[kill_at]), resume_folder(out))
        return out

    return copy


def record(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return entries


def losses_of(folder: Path) -> list[float]:
    return [point["loss"] for point in record(folder)["curve"]]


def resume_folder(out: Path) -> Path:
    return out.with_name(out.name + ".training")


def last_checkpoint(out: Path) -> Path | None:
    return max(
        resume_folder(out).glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]), default=None
    )


def assert_same_training(out: Path, undisturbed: Path) -> None:
    """Equal to the bit, and no other file is left."""
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    ours, theirs = record(out), record(undisturbed)
    for name in ("curve", "tokens", "steps", "evaluation", "settings", "data"):
        assert ours[name] == theirs[name], name
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def assert_complete(folder: Path) -> None:
    """A checkpoint that loads, with finite weights and its record."""
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
    """The schedule that the training must have had."""
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
    """Stands for a power cut."""


class Watch:
    """Records the progress of a training; raises at a step."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.started_at: tuple[int, int] | None = None
        self.steps: list[int] = []
        self.ended = False

    def note(self, text: str) -> None: ...

    def begin(self, steps: int, done: int) -> None:
        self.started_at = (steps, done)

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
def test_every_objective_makes_a_complete_checkpoint(
    base: str, rows: str, tmp_path: Path, objective: Objective
) -> None:
    """It loads in bfloat16, with tokenizer and record; the loss falls; no other file is left."""
    settings = replace(USUAL, epochs=6, batch_size=8, dtype="bfloat16")
    watch = Watch()
    out = run(objective, base, rows, settings, tmp_path / "out", progress=watch)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template(conversation(3), return_tensors="pt", return_dict=False)
    assert model(ids).logits.isfinite().all()
    assert model.dtype == torch.bfloat16
    assert tokenizer.mask_token == "<|mask|>"
    assert list(tmp_path.iterdir()) == [out]

    entries = record(out)
    assert (entries["objective"], entries["options"]) == (objective.name, asdict(objective))
    assert entries["settings"] == asdict(settings)
    assert entries["steps"] == 12
    for point in entries["curve"]:
        assert math.isclose(sum(point[name] for name in objective.parts), point["loss"], abs_tol=1e-5)
    curve = losses_of(out)
    assert sum(curve[-3:]) < sum(curve[:3])
    assert entries["evaluation"]["conversations"] == HELD_OUT
    assert (watch.started_at, watch.steps, watch.ended) == ((12, 0), list(range(1, 13)), True)


def test_medusa_does_not_change_its_target(base: str, rows: str, tmp_path: Path) -> None:
    """The weights are equal to the bit; the trained heads are in a file beside them."""
    out = run(Medusa(heads=2), base, rows, USUAL, tmp_path / "out")
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    heads = load_file(out / "medusa.safetensors")
    assert {name.partition(".")[0] for name in heads} == {"0", "1"}
    assert all(heads[f"{k}.hidden.weight"].any() for k in range(2))


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint of two layers: drafts read one before the last."""
    folder = tmp_path_factory.mktemp("deeper") / "init"
    return str(initialise(map(conversation, range(COUNT)), folder, seed=1, data={}, **SHAPE | {"num_hidden_layers": 2}))


def test_a_multi_token_prediction_layer_is_added_to_a_copy_of_its_target(base: str, rows: str, tmp_path: Path) -> None:
    """Whether the target's weights are in one file or several, in whatever dtype: they are equal to the bit."""
    sharded = tmp_path / "sharded"
    shutil.copytree(base, sharded)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(sharded, max_shard_size="8KB")
    (sharded / "model.safetensors").unlink()
    for source in (base, str(sharded)):
        out = run(Mtp(), source, rows, USUAL, tmp_path / "out")
        stored = [
            {k: v for f in sorted(Path(x).glob("*.safetensors")) for k, v in load_file(f).items()}
            for x in (source, out)
        ]
        for name, tensor in stored[0].items():
            assert torch.equal(tensor, stored[1][name])
            assert tensor.dtype == stored[1][name].dtype
        added = stored[1].keys() - stored[0].keys()
        assert {name.split(".")[1] for name in added} == {"mtp_layers"}
        target = load(str(out))
        assert load_draft(f"{out}#mtp", target).model.block.mlp.up_proj.weight.any()
        with pytest.raises(UserError, match="has a layer for multi-token prediction already"):
            check(requested(Mtp(), str(out), rows, USUAL, tmp_path / "again"))
        shutil.rmtree(out)


def all_tensors(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def accepted(folder: Path, *, trained: bool) -> tuple[list[list[int]], float]:
    """Greedy answers by the method `mtp` and its tokens per forward, with the layer or with one of random weights."""
    target = ModelRunner(load(str(folder)))
    draft = DraftRunner(load_draft(f"{folder}#mtp", target.checkpoint), target)
    if not trained:
        draft_objectives.initialise(draft.draft, 0.02)
    prompted = partial(target.checkpoint.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    prompts = [prompted(conversation(n)[:1]) for n in range(COUNT)]
    requests = [Request(prompt_ids=prompt, max_new_tokens=24, stop=(), seed=0) for prompt in prompts]
    runners = ModelRunners("ar", {"ar": target, "#mtp": draft})
    with torch.inference_mode():
        exact, _ = decode(METHODS["ar"](), runners, requests)
        drafted, _ = decode(METHODS["mtp"](ahead=3), runners, requests)
    answers = [one.token_ids for one in drafted]
    assert answers == [one.token_ids for one in exact]
    return answers, sum(map(len, answers)) / sum(one.forwards or 0 for one in drafted)


def test_a_trained_layer_drafts_what_its_target_says(base: str, rows: str, tmp_path: Path) -> None:
    """The method `mtp` decodes the target's tokens in fewer forwards than with an untrained layer."""
    target = run(Ar(), base, rows, replace(USUAL, epochs=20), tmp_path / "ar")
    out = run(Mtp(), str(target), rows, replace(USUAL, epochs=20), tmp_path / "mtp")
    answers, pace = accepted(out, trained=True)
    same_answers, random_pace = accepted(out, trained=False)
    assert answers == same_answers
    assert pace > 1.3 * random_pace


def test_distillation_brings_a_draft_closer_to_its_teacher(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """The divergence from the teacher's distribution falls; for the teacher itself it is 0."""
    settings = replace(USUAL, epochs=8)
    out = run(Draft(distil="logits"), base, rows, settings, tmp_path / "out", teacher=str(undisturbed))
    curve = losses_of(out)
    assert sum(curve[-4:]) < 0.5 * sum(curve[:4])
    assert record(out)["teacher_sha256"] == weights_sha256(undisturbed)
    same = run(Draft(distil="logits"), str(undisturbed), rows, USUAL, tmp_path / "same", teacher=str(undisturbed))
    assert losses_of(same)[0] == pytest.approx(0, abs=1e-5)


def test_the_same_command_makes_the_same_weights(base: str, rows: str, undisturbed: Path, tmp_path: Path) -> None:
    """Training is a function of its request. Another seed gives another training."""
    assert_same_training(run(MARS, base, rows, USUAL, tmp_path / "same" / "out"), undisturbed)
    other = run(MARS, base, rows, replace(USUAL, seed=20261121), tmp_path / "other" / "out")
    assert losses_of(other) != losses_of(undisturbed)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({"rows": 1}, 1e-5), ({"rows": 8}, 1e-5), ({"pack": 120}, 1e-5), ({"checkpointing": True}, 1e-6)],
    ids=str,
)
def test_saving_memory_changes_no_loss(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    """Fewer rows per forward pass, packing and recomputed activations give the same curve."""
    out = run(MARS, base, rows, replace(USUAL, **changes), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=tolerance * 10)
    assert record(out)["tokens"] == record(undisturbed)["tokens"]


def test_bfloat16_arithmetic_gives_nearly_the_same_losses(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """Weights and optimizer stay in float32."""
    out = run(MARS, base, rows, replace(USUAL, precision="bfloat16"), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), rel=0.02)
    assert losses_of(out) != losses_of(undisturbed)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


# --- What the record says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", [5, STEPS])
def test_a_resumable_checkpoint_has_the_whole_record(
    base: str, rows: str, interrupted: Callable[[int, Path], Path], tmp_path: Path, kill_at: int
) -> None:
    """Objective, options, data, base, versions and seed as at the end; tokens as counted from the schedule."""
    found = last_checkpoint(interrupted(kill_at, tmp_path))
    assert found is not None
    assert_complete(found)
    entries, done, schedule = record(found), int(found.name.partition("-")[2]), plan(base, rows, MARS)
    assert done == (kill_at - 1) // 2 * 2
    assert entries["objective"] == "mars"
    assert entries["options"] == asdict(MARS)
    assert entries["settings"]["seed"] == 42
    assert entries["base_sha256"] == weights_sha256(Path(base))
    data = prepare(rows, None, AutoTokenizer.from_pretrained(base), max_length=48, seed=0)
    assert entries["data"]["sha256"] == data.sha256
    assert {"torch", "transformers", "multi-token-bench"} <= entries["versions"].keys()
    batches = [schedule[number] for number in range(done * schedule.forwards)]
    assert entries["tokens"] == {
        "fed": sum(int((batch["document"] != PADDING).sum()) for batch in batches),
        "predicted": sum(len(batch["predictor"]) for batch in batches),
        "conversations": sum(len(schedule.conversations(step)) for step in range(done)),
    }
    assert [point["step"] for point in entries["curve"]] == list(range(1, done + 1))


def test_a_long_training_has_a_curve_of_at_least_fifty_points(base: str, rows: str, tmp_path: Path) -> None:
    """The last step has a point, even if the training was killed just before the checkpoint was written."""
    settings, out = replace(USUAL, batch_size=1, epochs=7, save_steps=None), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_checkpoint", broken_after(None, 0))
        with pytest.raises(Killed):
            run(Ar(), base, rows, settings, out)
    entries = record(run(Ar(), base, rows, settings, out))
    assert entries["steps"] == 105
    assert [point["step"] for point in entries["curve"]] == [*range(2, 105, 2), 105]
    assert entries["tokens"]["conversations"] == 105
    rates = [point["learning_rate"] for point in entries["curve"]]
    assert rates[0] == pytest.approx(1e-2 / 21)  # of step 2, the second of 21 that warm up
    assert 0 < rates[-1] < 1e-5


def test_the_curve_has_the_learning_rate_of_each_step(undisturbed: Path) -> None:
    """From 0 up to the peak in a fifth of the steps, then along a cosine."""
    rates = [point["learning_rate"] for point in record(undisturbed)["curve"]]
    warm = math.ceil(0.2 * STEPS)
    cosine = [0.5 * (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) for step in range(warm, STEPS)]
    assert rates == pytest.approx([1e-2 * x for x in [*(step / warm for step in range(warm)), *cosine]])


# --- Resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", [1, 5, STEPS])
def test_a_killed_and_resumed_training_equals_the_undisturbed_one(
    base: str, rows: str, undisturbed: Path, interrupted: Callable[[int, Path], Path], tmp_path: Path, kill_at: int
) -> None:
    """Before the first save, right after one, and at the last step: curve, tokens and weights are equal to the bit.

    Saved steps are not repeated.
    """
    out, watch = interrupted(kill_at, tmp_path), Watch()
    assert_same_training(run(MARS, base, rows, USUAL, out, progress=watch), undisturbed)
    saved = (kill_at - 1) // 2 * 2
    assert (watch.started_at, watch.steps) == ((STEPS, saved), list(range(saved + 1, STEPS + 1)))


@pytest.mark.parametrize(
    "objective",
    [
        Eagle(steps=2),
        BlockDraft(layers=1, block_size=3, anchors=4),
        MarkovBlockDraft(layers=1, block_size=3, markov_rank=4, anchors=4),
        Mtp(),
    ],
    ids=lambda objective: objective.name,
)
def test_a_draft_killed_and_resumed_equals_the_undisturbed_one(
    objective: DraftObjective, deeper: str, rows: str, tmp_path: Path
) -> None:
    """Curve and weights are equal to the bit; saved steps are not repeated."""
    undisturbed = run(objective, deeper, rows, USUAL, tmp_path / "undisturbed" / "out")
    out, watch = tmp_path / "killed" / "out", Watch()
    with pytest.raises(Killed):
        run(objective, deeper, rows, USUAL, out, progress=Watch(5))
    assert_same_training(run(objective, deeper, rows, USUAL, out, progress=watch), undisturbed)
    assert watch.steps == list(range(5, STEPS + 1))


@pytest.mark.parametrize("objective", [Eagle(steps=2), Mtp()], ids=lambda objective: objective.name)
@pytest.mark.parametrize("changes", [{"checkpointing": True}, {"pack": 120}], ids=str)
def test_saving_memory_changes_no_loss_of_a_draft(
    objective: DraftObjective, changes: dict[str, Any], deeper: str, rows: str, tmp_path: Path
) -> None:
    """With activations recomputed, its steps still read the keys of those before."""
    plain = run(objective, deeper, rows, USUAL, tmp_path / "plain")
    out = run(objective, deeper, rows, replace(USUAL, **changes), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(plain), abs=1e-4)


KILLING = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from mtbench.training.objectives import Mars
from mtbench.training.train import TrainingRequest, train
from mtbench.training.trainer import Settings

torch.set_num_threads(1)
base, rows, out, settings, options = json.loads(sys.argv[1])
request = TrainingRequest(
    objective=Mars(**options), base=base, data=(rows,), settings=Settings(**settings), out=Path(out)
)

def start():
    pid = os.fork()
    if pid:
        return pid
    try:
        train(request)
    finally:
        os._exit(0)

def done():
    return max((int(f.name[11:]) for f in request.resume_folder.glob("checkpoint-*")), default=0)

random.seed(0)
for goal in (0, 9, 33):
    pid = start()
    while not request.resume_folder.exists() or done() < goal:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(done(), flush=True)
if not Path(out).exists():
    os.waitpid(start(), 0)
"""


@pytest.mark.slow
def test_a_training_killed_at_random_moments_equals_the_undisturbed_one(base: str, rows: str, tmp_path: Path) -> None:
    """By SIGKILL, which cannot be caught, three times: before the first save, in a step or while saving."""
    settings = replace(USUAL, epochs=12, save_steps=1)
    undisturbed = run(MARS, base, rows, settings, tmp_path / "undisturbed" / "out")
    out = tmp_path / "killed" / "out"
    values = json.dumps([base, rows, str(out), asdict(settings), asdict(MARS)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLING, values], capture_output=True, text=True, check=True, timeout=300
    )
    assert len(set(killed.stdout.splitlines())) == 3, killed.stdout + killed.stderr
    assert_same_training(out, undisturbed)


def broken_after(function: Any, times: int) -> Any:
    """Return the function, which raises after this many calls."""
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
    """If writing, moving or removing one is interrupted, the last one is complete, and the same command finishes."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, what, broken_after(getattr(where, what), times))
        with pytest.raises(Killed):
            run(MARS, base, rows, USUAL, out)
    for folder in resume_folder(out).glob("checkpoint-*"):
        if folder == last_checkpoint(out):
            assert_complete(folder)
    if out.exists():  # it is complete; only the resume folder could not be removed
        assert_complete(out)
        return
    assert_same_training(run(MARS, base, rows, USUAL, out), undisturbed)


def test_half_written_folders_of_a_killed_training_are_ignored(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """Both `out.partial` and `writing`."""
    out = tmp_path / "out"
    for folder in (out.with_name("out.partial"), resume_folder(out) / "writing" / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("half")
        (folder / "stale").write_text("")
    assert_same_training(run(MARS, base, rows, USUAL, out), undisturbed)
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
def test_an_interrupted_training_is_not_resumed_by_another_request(
    base: str,
    rows: str,
    interrupted: Callable[[int, Path], Path],
    tmp_path: Path,
    changes: dict[str, Any],
    objective: Objective,
    what: str,
) -> None:
    """One line names the difference; every file stays as it was."""
    out = interrupted(5, tmp_path)
    before = {path: path.read_bytes() for path in resume_folder(out).rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refusal:
        run(objective, base, rows, replace(USUAL, **changes), out)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert {path: path.read_bytes() for path in resume_folder(out).rglob("*") if path.is_file()} == before


def test_other_data_and_another_base_are_another_request(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """They are compared by content, not by name."""
    out, file, start = tmp_path / "out", tmp_path / "rows.jsonl", tmp_path / "base"
    shutil.copy(rows, file)
    shutil.copytree(base, start)
    with pytest.raises(Killed):
        run(MARS, str(start), str(file), USUAL, out, progress=Watch(2))
    shutil.copy(undisturbed / "model.safetensors", start)
    with pytest.raises(UserError, match="base_sha256 was"):
        run(MARS, str(start), str(file), USUAL, out)
    shutil.copy(Path(base) / "model.safetensors", start)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(UserError, match=r"data\.sha256 was"):
        run(MARS, str(start), str(file), USUAL, out)


def test_an_existing_folder_is_never_overwritten(base: str, rows: str, undisturbed: Path) -> None:
    """`--out` must not exist."""
    before = (undisturbed / RECORD).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        run(MARS, base, rows, USUAL, undisturbed)
    assert (undisturbed / RECORD).read_bytes() == before


# --- Stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_of_a_forward", [1, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_nonfinite_loss_stops_with_step_rate_and_conversations(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_forward: int, value: float
) -> None:
    """The conversation is named; saved checkpoints stay good, and the same command stops at the same step."""
    settings, out = replace(USUAL, rows=rows_of_a_forward, save_steps=1), tmp_path / "out"
    schedule = plan(base, rows, Ar(), settings)
    bad = schedule.conversations(2)[1]
    text = schedule.examples[bad].ids
    build = Ar.build

    def with_bad_weight(self: Ar, example: packing.Example, *rest: Any) -> packing.TrainingSequence:
        sequence = build(self, example, *rest)
        return sequence._replace(weight=sequence.weight * value) if torch.equal(example.ids, text) else sequence

    monkeypatch.setattr(Ar, "build", with_bad_weight)
    forward = next(n for n in range(schedule.forwards) if bad in schedule.conversations(2, n))
    named = ", ".join(map(str, schedule.conversations(2, forward)))
    assert (named == str(bad)) == (rows_of_a_forward == 1)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            run(Ar(), base, rows, settings, out)
        assert f"the loss of step 3 is {value}, at a learning rate of 0.01, on conversations {named};" in str(
            error.value
        )
        assert "\n" not in str(error.value)
        assert not out.exists()
        assert [folder.name for folder in resume_folder(out).glob("checkpoint-*")] == ["checkpoint-2"]
        assert_complete(resume_folder(out) / "checkpoint-2")


@pytest.mark.parametrize(("step", "save_steps", "left"), [(4, 2, "checkpoint-2"), (STEPS, 3, "checkpoint-6")])
def test_a_nonfinite_gradient_stops_before_the_weights_are_saved(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, save_steps: int, left: str
) -> None:
    """Even if the loss is finite, because the weights are lost. In the last step, too."""
    out = tmp_path / "out"
    schedule = plan(base, rows, Ar())
    forwards = iter(range(10_000))

    losses = Ar.losses

    def steep(objective: Ar, model: Any, *rest: Any) -> Losses:
        total, parts = losses(objective, model, *rest)
        if model.training and next(forwards) == (step - 1) * schedule.forwards:
            total = total + (total - total.detach()).sqrt()  # 0, with an infinite gradient
        return Losses(total, parts)

    monkeypatch.setattr(Ar, "losses", steep)
    with pytest.raises(UserError, match=f"the gradient of step {step} is (inf|nan), at a learning rate of") as error:
        run(Ar(), base, rows, replace(USUAL, save_steps=save_steps), out)
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
def test_an_out_of_memory_error_says_what_to_halve(
    base: str,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    changes: dict[str, Any],
    advice: str,
) -> None:
    """First the options that change no loss; a packed row still holds the longest conversation."""
    monkeypatch.setattr(loss, "target_states", broken_by(error))
    with pytest.raises(UserError, match="out of memory") as refusal:
        run(Mars(block_size=2), base, rows, replace(USUAL, **changes), tmp_path / "out")
    assert advice in str(refusal.value)


def broken_by(error: Exception) -> Any:
    def broken(*_: Any) -> Any:
        raise error

    return broken


def test_another_error_is_not_reported_as_out_of_memory(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised unchanged."""
    monkeypatch.setattr(loss, "target_states", broken_by(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(Ar(), base, rows, USUAL, tmp_path / "out")


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (torch, "save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")),
        (torch, "save", OSError(28, "No space left on device")),
        (trainer, "write_record", OSError(28, "No space left on device")),
        (checkpoint, "write_record", OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk_is_one_line_and_the_same_command_resumes(
    base: str,
    rows: str,
    undisturbed: Path,
    tmp_path: Path,
    where: Any,
    what: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a resumable checkpoint, whose writer has errors of its own, and in the finished one."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(where, what, broken_by(error))
        with pytest.raises(UserError, match=r"^cannot write [^\n]*out[^\n]*Make room, then repeat the command[^\n]*$"):
            run(MARS, base, rows, USUAL, out)
    assert_same_training(run(MARS, base, rows, USUAL, out), undisturbed)


def test_after_out_of_memory_a_training_resumes_with_fewer_rows(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the advice, gives the same curve, and its record has the new setting."""
    out, forward = tmp_path / "out", loss.target_states
    calls = iter(range(1000))

    def short(model: Any, batch: Any, taps: Any) -> Any:
        if next(calls) == 5 * 2 + 1:
            raise OUT_OF_MEMORY[0]
        return forward(model, batch, taps)

    monkeypatch.setattr(loss, "target_states", short)
    with pytest.raises(UserError, match="--rows 1`"):
        run(MARS, base, rows, USUAL, out)
    watch = Watch()
    run(MARS, base, rows, replace(USUAL, rows=1), out, progress=watch)
    assert watch.started_at == (STEPS, 4)
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=1e-5)
    assert record(out)["settings"]["rows"] == 1


# --- Which models -------------------------------------------------------------------------------------------------


def saved(folder: Path, base: str, config: Any) -> str:
    """A random model with the base's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def test_a_model_whose_logits_are_not_one_product_is_refused(base: str, rows: str, tmp_path: Path) -> None:
    """The loss of training would be wrong for it. The error is one line, and nothing is written."""
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=1.0, initializer_range=0.5)
    gemma = saved(tmp_path / "gemma", base, config)
    with pytest.raises(UserError, match=r"computes its logits by more than one matrix product \(gemma2\)") as error:
        run(Ar(), gemma, rows, USUAL, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["gemma"]


def test_a_sliding_window_is_used_in_training(base: str, rows: str, tmp_path: Path) -> None:
    """The loss before the first step is that of transformers' own attention on each conversation alone."""
    config = MistralConfig(**SHAPE, sliding_window=5, initializer_range=0.5, eos_token_id=None, bos_token_id=None)
    mistral = saved(tmp_path / "mistral", base, config)
    settings = replace(USUAL, batch_size=COUNT - HELD_OUT, epochs=1, pack=96)
    out = run(Ar(), mistral, rows, settings, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(mistral, attn_implementation="eager")
    schedule = plan(mistral, rows, Ar(), settings)
    surprises = []
    with torch.no_grad():
        for example in schedule.examples:
            log_p = model(example.ids[None]).logits[0].log_softmax(1)
            surprises += [-log_p[t - 1, example.ids[t]] for t in range(example.prompt, len(example.ids))]
    assert losses_of(out) == pytest.approx([torch.stack(surprises).mean().item()], abs=1e-5)
    assert max(len(example.ids) for example in schedule.examples) > 10


def test_a_teacher_may_have_more_rows_of_padding(base: str, rows: str, tmp_path: Path) -> None:
    """As Qwen2.5 from 7B on: rows without a token are ignored."""
    teacher = AutoModelForCausalLM.from_pretrained(base)
    rows_of_base = teacher.get_input_embeddings().weight.shape[0]
    teacher.resize_token_embeddings(rows_of_base + 16, mean_resizing=False)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "teacher")
    out = run(Draft(distil="logits"), base, rows, USUAL, tmp_path / "out", teacher=str(tmp_path / "teacher"))
    assert losses_of(out)[0] == pytest.approx(0, abs=1e-5)
    with pytest.raises(UserError, match=f"has {rows_of_base} ids, fewer than the {rows_of_base + 16} of the base"):
        run(Draft(distil="logits"), str(tmp_path / "teacher"), rows, USUAL, tmp_path / "no", teacher=base)


# --- Refusals before weights are loaded ---------------------------------------------------------------------------


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def load(_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(training, "_load", load)


def both_refuse(request: TrainingRequest, reason: str) -> None:
    """`train` and `check`, which the dry run calls, refuse with the same line."""
    for refuse in (train, partial(check, fetch=False)):
        with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*$"):
            refuse(request)


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("objective", "changes", "teacher", "reason"),
    [
        (Draft(), {}, True, "draft with these options uses no teacher; leave out `--teacher`"),
        (Draft(distil="logits"), {}, False, "draft needs `--teacher CHECKPOINT`"),
        (
            Mars(),
            {"pack": 64},
            False,
            "cannot hold a conversation of 48, for which mars feeds up to 93; give `--pack 93`",
        ),
        (Ar(), {"max_length": 2}, False, r"no conversation shorter than max_length 2 .*; give .* `--max-length N`"),
    ],
    ids=["teacher", "no teacher", "pack", "max_length"],
)
def test_options_are_refused_before_weights_are_loaded(
    base: str, rows: str, tmp_path: Path, objective: Objective, changes: dict[str, Any], teacher: bool, reason: str
) -> None:
    """By the dry run, too; nothing is written."""
    request = requested(objective, base, rows, replace(USUAL, **changes), tmp_path / "out")
    both_refuse(replace(request, teacher=base) if teacher else request, reason)
    assert not list(tmp_path.iterdir())


def changed_copy(base: str, folder: Path, file: str, old: str, new: str) -> str:
    """A copy of the base in which one text of a file is replaced."""
    if not folder.exists():
        shutil.copytree(base, folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    return str(folder)


@pytest.mark.usefixtures("without_weights")
def test_a_base_is_refused_before_weights_are_loaded(base: str, rows: str, tmp_path: Path) -> None:
    """One that is missing, has no chat template, no room for a mask token, or no list of layers."""

    def refuse(source: str, reason: str, objective: Objective) -> None:
        both_refuse(requested(objective, source, rows, USUAL, tmp_path / "out"), reason)

    refuse("/nowhere/at-all", "'/nowhere/at-all'", Ar())
    untemplated = tmp_path / "untemplated"
    shutil.copytree(base, untemplated)
    (untemplated / "chat_template.jinja").unlink()
    refuse(str(untemplated), "the tokenizer has no chat template", Ar())
    vocabulary = AutoTokenizer.from_pretrained(base).get_vocab()
    full = tmp_path / "full"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        changed_copy(base, full, file, "<|mask|>", "<|other|>")
    changed_copy(base, full, "tokenizer_config.json", '"mask_token"', '"other_token"')
    rows_of_base = json.loads((full / "config.json").read_text())["vocab_size"]
    changed_copy(base, full, "config.json", f'"vocab_size": {rows_of_base}', f'"vocab_size": {len(vocabulary)}')
    refuse(str(full), "has no mask token and no unused embedding row", MARS)
    gpt2 = saved(tmp_path / "gpt2", base, GPT2Config(vocab_size=SHAPE["vocab_size"], n_embd=16, n_layer=1, n_head=2))
    refuse(gpt2, r"has no `base_model\.layers` \(gpt2\)", Ar())
    refuse(base, "eagle reads layers before the last, and the base has one", Eagle())
    for drafts in (BlockDraft(), MarkovBlockDraft()):
        refuse(str(full), "has no mask token and no unused embedding row", drafts)
        grown = requested(drafts, str(full), rows, USUAL, tmp_path / "out", grow_vocabulary=True)
        both_refuse(grown, f"{drafts.name} leaves the model as it is, and --grow-vocabulary would change it")


@pytest.mark.usefixtures("without_weights")
def test_a_teacher_with_another_vocabulary_is_refused_before_weights_are_loaded(
    base: str, rows: str, tmp_path: Path
) -> None:
    """A token id must mean the same to base and teacher."""
    talk = [[{"role": "user", "content": "wholly other words"}, {"role": "assistant", "content": "words other"}]] * 3
    other = initialise(talk, tmp_path / "other", seed=1, data={}, **SHAPE)
    request = requested(Draft(distil="logits"), base, rows, USUAL, tmp_path / "out")
    both_refuse(replace(request, teacher=str(other)), "the teacher's tokenizer gives")
    both_refuse(replace(request, teacher="/nowhere/teacher"), "'/nowhere/teacher'")


@pytest.mark.usefixtures("without_weights")
def test_data_are_refused_before_weights_are_loaded(base: str, rows: str, tmp_path: Path) -> None:
    """Data that do not exist, a suite without a number of examples, and a row that is not a conversation."""
    both_refuse(requested(Ar(), base, "nothing", USUAL, tmp_path / "out"), "no data 'nothing'; known: a suite")
    both_refuse(requested(Ar(), base, "arithmetic", USUAL, tmp_path / "out"), "`--examples N`")
    late = tmp_path / "late.jsonl"
    late.write_text(Path(rows).read_text() * 20 + '{"text": "no conversation"}\n')
    both_refuse(requested(Ar(), base, str(late), USUAL, tmp_path / "out"), rf"line {20 * COUNT + 1}: columns")


def test_folders_are_refused_before_weights_are_loaded(
    base: str,
    rows: str,
    interrupted: Callable[[int, Path], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """An existing `--out`, and an interrupted training of another request."""
    out = interrupted(5, tmp_path)
    request.getfixturevalue("without_weights")
    (tmp_path / "existing").mkdir()
    both_refuse(requested(MARS, base, rows, USUAL, tmp_path / "existing"), "exists already")
    both_refuse(requested(MARS, base, rows, replace(USUAL, seed=1), out), r"settings\.seed was 42, not 1")


def test_a_dry_run_fetches_nothing_from_the_hub(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets on the hub are not read; everything else is checked, and nothing is written."""
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    request = requested(Ar(), base, "owner/name", USUAL, tmp_path / "out")
    assert check(request, fetch=False).data is None
    assert not list(tmp_path.iterdir())
