"""Fixtures every test file may use, and what holds for all files. tests/conftest.py imports this."""

import gc
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsers import end_browser
from forked import forking
from recorded_graphs import recorded as recorded  # a fixture
from shared import made_once
from small import small_checkpoint, small_tokenizer
from transformers import PretrainedConfig
from whole import forget_plugin_files, whole_run

from mtbench.hardware import machine
from mtbench.models.runner import ModelRunner
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.results import flags, samples

gc.disable()  # until all is imported
LONGEST = {"every_method", "kernels", "choose", "benchmarks", "mtp", "train_again", "stages", "loop", "report"}
LONGEST |= {"train", "comparisons", "llamacpp", "engine_arms", "methods", "run", "sandbox"}
BEGAN_S = dict[Path, float]()  # file -> processor time before its first test
MOST_S = 90.0  # of a processor, for a file in CI: three times the longest, since machines and their load differ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that at the end no worker is left alone with one of them."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def processor_s() -> float:
    """The processor time of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    BEGAN_S.setdefault(item.path, processor_s())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """CI refuses a file that takes long: find the same with less, or mark tests slow that have a cheaper twin."""
    yield
    ends = nextitem is None or nextitem.path != item.path
    spent_s = processor_s() - BEGAN_S[item.path]
    if ends and spent_s > MOST_S and "CI" in os.environ and item.get_closest_marker("slow") is None:
        pytest.fail(f"{item.path.name} took {spent_s:.0f} s of a processor, more than {MOST_S:.0f}", pytrace=False)


def pytest_collection_finish() -> None:
    """Leave the objects of all imports out of garbage collections: there are a million of them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that tests keep for the next time are not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def left_by_a_file() -> Iterator[None]:
    """What the tests of a file load or start is not there for the next file."""
    yield
    forget_plugin_files()
    end_browser()


@pytest.fixture(autouse=True, scope="session")
def loaded_machine() -> Iterator[None]:
    """Tests share the processor with each other, so no cell is flagged and no sample dropped for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "PROCESSOR_SHARE", 0.0)
        patch.setattr(machine, "COMPUTING_SHARE", 0.0)
        patch.setattr(machine, "THROTTLED_SHARE", float("inf"))
        patch.setattr(samples, "FAR_OFF", float("inf"))
        patch.setattr(samples, "STRETCHED", float("inf"))
        yield


@pytest.fixture
def forks() -> Iterator[None]:
    """Processes of Python are forked from this one: they need not import torch again."""
    with forking():
        yield


@pytest.fixture(scope="session")
def runner() -> ModelRunner:
    return ModelRunner(small_checkpoint())


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., ModelRunner]:
    def make(config: PretrainedConfig | None = None, seed: int = 0) -> ModelRunner:
        return ModelRunner(small_checkpoint(config, seed))

    return make


@pytest.fixture(scope="session")
def hostile_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint on disk, many of whose words are markup that would break out of a careless page."""
    return made_once(tmp_path_factory, "checkpoint", save_hostile)


def save_hostile(folder: Path) -> None:
    checkpoint = small_checkpoint()
    checkpoint.model.float().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    words = {w: i for w, i in stored["model"]["vocab"].items() if w != "a" and not w.startswith("<|")}
    for word, index in words.items():
        del stored["model"]["vocab"][word]
        stored["model"]["vocab"][f"</script><script>broken=1</script><b>&amp;{word}"] = index
    (folder / "tokenizer.json").write_text(json.dumps(stored))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, hostile_checkpoint: Path) -> RunDirectory:
    """A real run, from plan to results.json: two suites, one of them not scored, four arms, two batch sizes."""

    def make(folder: Path) -> None:
        prompts = folder / "my prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"a a {'a ' * i}"}) + "\n" for i in range(7)))
        request = RunRequest(
            suite=["arithmetic", f"prompts:{prompts}"],
            checkpoint={role: str(hostile_checkpoint) for role in ("ar", "mars")},
            method=["ar", "ar:on=mars", "mars:tau=1.0|0.3"],
            batch_size=(1, 2),
            limit=7,
            rounds=2,
            max_new_tokens=10,
            device="cpu",
        )
        whole_run(folder, request)

    shared = made_once(tmp_path_factory, "run", make)
    return RunDirectory(Path(shutil.copytree(shared, tmp_path_factory.mktemp("small"), dirs_exist_ok=True)) / "run")
