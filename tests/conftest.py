"""Fixtures every test file may use."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recorded_graphs import recorded as recorded  # a fixture
from small import small_checkpoint, small_tokenizer
from transformers import PretrainedConfig
from whole import forget_plugin_files, whole_run

from mtbench.hardware import machine
from mtbench.models.runner import ModelRunner
from mtbench.results import flags, samples
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import RunRequest

gc.disable()  # until all is imported
LONGEST = {"kernels", "choose", "train", "loop", "report", "reproduce", "stages", "comparisons", "plugins", "methods"}
LONGEST |= {"run", "sandbox"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that at the end no worker is left alone with one of them."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


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
def own_plugin_files() -> Iterator[None]:
    """What the tests of a file load is not there for the next file."""
    yield
    forget_plugin_files()


@pytest.fixture(autouse=True, scope="session")
def loaded_machine() -> Iterator[None]:
    """Tests share the processor with each other, so no cell is flagged and no sample dropped for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "PROCESSOR_SHARE", 0.0)
        patch.setattr(machine, "COMPUTING_SHARE", 0.0)
        patch.setattr(samples, "FAR_OFF", float("inf"))
        patch.setattr(samples, "STRETCHED", float("inf"))
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
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint = small_checkpoint()
    checkpoint.model.float().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    words = {w: i for w, i in stored["model"]["vocab"].items() if w != "a" and not w.startswith("<|")}
    for word, index in words.items():
        del stored["model"]["vocab"][word]
        stored["model"]["vocab"][f"</script><script>broken=1</script><b>&amp;{word}"] = index
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, hostile_checkpoint: Path) -> RunDirectory:
    """A real run, from plan to results.json: two suites, one of them not scored, four arms, two batch sizes."""
    folder = tmp_path_factory.mktemp("small")
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
    return whole_run(folder, request)
