"""`mtbench load --server ENGINE`: the load starts the engine's server itself, one for each arm and round."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from living import is_alive
from made_loads import PYTHON, begun, load_run, request
from scripted_engine import PLUGIN, Scripted, install
from whole import forget_plugin_files

from mtbench import plugins
from mtbench.clients.serving_engine import Serving
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.experiments.load import planning
from mtbench.experiments.load.document import document
from mtbench.experiments.load.experiment import refuse_other_servers
from mtbench.experiments.load.runner import read_points, read_servers
from mtbench.experiments.load.summary import summarise


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripted engine's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plugins.load_file(PLUGIN)
    yield
    forget_plugin_files()


@pytest.mark.usefixtures("scripted")
def test_every_method_in_each_server(tmp_path: Path) -> None:
    """An engine is installed first, and without a method its server decodes plainly."""
    with pytest.raises(UserError, match="run `mtbench fetch engine scripted`"):
        planning.plan(request(engine=["scripted"]))
    install(Scripted, "scripted==1")
    assert [arm.name for arm in planning.plan(request(engine=["scripted"])).arms] == ["ar:engine=scripted"]
    arms = planning.plan(request(engine=["graph", "scripted"], method=["ar"])).arms
    assert [(arm.method, arm.engine) for arm in arms] == [
        ("ar:on=ar,engine=graph", None),
        ("ar:on=ar,engine=scripted", "scripted"),
    ]
    with pytest.raises(UserError, match=r"Scripted has no mars\. It has ar, prompt-lookup;"):
        planning.plan(request(engine=["scripted"], method=["mars"]))


@pytest.mark.usefixtures("scripted")
def test_the_load_starts_and_ends_the_server(tmp_path: Path) -> None:
    """Requests have the fields that the engine wants, and their tokens are those of its own count."""
    install(Scripted, "scripted==1", wants={"cached": False, "temperature": 0}, child=str(tmp_path / "child"))
    asked = request(engine=["scripted"], request_rate=[50.0], requests=3, rounds=1, max_new_tokens=5)
    run, planned = begun(tmp_path / "load", asked)
    load_run(run, planned).send(PYTHON)
    [ended] = read_points(run, planned)
    assert [(sent.outcome, sent.tokens, sent.forwards) for sent in ended.requests] == [("ok", 5, None)] * 3
    assert read_servers(run)["ar:engine=scripted"].engine == "Scripted, scripted==1"
    assert not is_alive(int((tmp_path / "child").read_text()))
    found = summarise(run, planned)
    assert "Scripted, scripted==1: scripted" in str(document(found))


@pytest.mark.usefixtures("scripted")
def test_a_server_of_token_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVING_ENGINES["scripted"], "text", False)
    with pytest.raises(UserError, match="Scripted takes token ids only, and the client of a load sends text"):
        planning.plan(request(engine=["scripted"]))


@pytest.mark.usefixtures("scripted")
def test_alternatives_of_an_option_are_servers_of_their_own(tmp_path: Path) -> None:
    """Each is started with its value, and named by it."""
    install(Scripted, "scripted==1")
    asked = request(engine=["scripted"], engine_option=["scripted:seed=1|2"], request_rate=[50.0], requests=2, rounds=1)
    run, planned = begun(tmp_path / "load", asked)
    load_run(run, planned).send(PYTHON)
    commands = {name: facts.command for name, facts in read_servers(run).items()}
    assert commands.keys() == {"ar:engine=scripted+seed=1", "ar:engine=scripted+seed=2"}
    assert all(command and command[-2:] == ["--seed", name[-1]] for name, command in commands.items())


@pytest.mark.usefixtures("scripted")
def test_an_engine_has_a_prefix_cache_if_its_arm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's field that switches the cache off goes to the other arm only."""
    install(Scripted, "scripted==1")
    engine, started, launch = SERVING_ENGINES["scripted"], set[bool](), Scripted.launch

    def launched(self: Scripted, python: Path, serving: Serving, port: int) -> list[str]:
        self.script = self.script | {"wants": {} if serving.prefix_cache else {"cached": False}}
        started.add(serving.prefix_cache)
        return launch(self, python, serving, port)

    monkeypatch.setattr(engine, "caches", True)
    monkeypatch.setattr(engine, "launch", launched)
    asked = request(engine=["scripted"], prefix_cache=["off", "on"], request_rate=[50.0], requests=2, rounds=1)
    run, planned = begun(tmp_path / "load", asked)
    assert [arm.name for arm in planned.arms] == ["ar:engine=scripted", "ar:engine=scripted+prefix-cache=on"]
    load_run(run, planned).send(PYTHON)
    assert all(sent.outcome == "ok" for each in read_points(run, planned) for sent in each.requests)
    assert started == {False, True}


@pytest.mark.usefixtures("scripted")
def test_a_plans_options_are_given_again(tmp_path: Path) -> None:
    """They may name code, and a plan is untrusted."""
    install(Scripted, "scripted==1")
    asked = request(engine=["scripted"], engine_option=["scripted:seed=1"])
    planned = planning.plan(asked)
    refuse_other_servers(planned, asked)
    with pytest.raises(UserError, match="add `--engine-option scripted:seed=1`"):
        refuse_other_servers(planned, request())
