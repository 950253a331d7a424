"""How arms are written, and how they are named."""

import re

import pytest

from mtbench.decoding.arms import baselines, cell_id, engine_baselines, parse_arms, reference_arm
from mtbench.errors import UserError
from mtbench.options.engine_options import EngineOption


@pytest.mark.parametrize(
    ("spec", "strings", "file_ids"),
    [
        ("ar", ["ar@ar/graph"], ["ar.ar.graph"]),
        ("mars:tau=1.0", ["mars@mars/graph"], ["mars.mars.graph"]),
        (
            "mars:cache=block,tau=0.95|0.8",
            ["mars:tau=0.95,cache=block@mars/graph", "mars:tau=0.8,cache=block@mars/graph"],
            ["mars-tau0.95-cacheblock.mars.graph", "mars-tau0.8-cacheblock.mars.graph"],
        ),
        ("mars:tau=0.9,engine=graph", ["mars:tau=0.9@mars/graph"], ["mars-tau0.9.mars.graph"]),
        (
            "hf-generate:cache=dynamic|static",
            ["hf-generate@ar", "hf-generate:cache=static@ar"],
            ["hf-generate.ar", "hf-generate-cachestatic.ar"],
        ),
    ],
)
def test_an_arm_is_written_with_what_differs_from_the_defaults(
    spec: str, strings: list[str], file_ids: list[str]
) -> None:
    """Options are in declaration order, in any order of the input. Alternatives are several arms."""
    arms = parse_arms([spec])
    assert [str(a) for a in arms] == strings
    assert [a.file_id for a in arms] == file_ids


def test_two_spellings_of_one_arm_are_one_arm_given_twice() -> None:
    """An explicit default value changes nothing, unless the checkpoint sets the default."""
    plain, said, trained = parse_arms(["mars", "mars:tau=1,cache=cursor", "mars:block_size=4"])
    assert (str(plain), str(said)) == ("mars@mars/graph", "mars@mars/graph#2")
    assert cell_id("gsm8k", said, 8) == "gsm8k.mars.mars.graph_2.b8"
    assert str(trained) == "mars:block_size=4@mars/graph"
    assert len({str(a) for a in parse_arms(["mars:tau=0.9999999|0.99999999"])}) == 2


def test_the_engine_of_an_arm_overrides_the_flag() -> None:
    """`--engine` applies only to arms without `engine=`."""
    assert parse_arms(["ar:engine=eager"], engines=["warp"])[0].engine == "eager"


def test_options_of_an_engine_are_in_the_arms_of_that_engine() -> None:
    """Each combination of alternatives makes an arm; only the first is a reference."""
    given = ["vllm:kv-cache-dtype=auto|fp8", "vllm:enforce-eager", "llamacpp:threads=2"]
    arms = parse_arms(["ar"], ["graph", "vllm"], [*map(EngineOption.read, given)])
    assert [str(arm) for arm in arms] == [
        "ar@ar/graph",
        "ar@ar/vllm+kv-cache-dtype=auto+enforce-eager",
        "ar@ar/vllm+kv-cache-dtype=fp8+enforce-eager",
    ]
    assert [arm.is_reference for arm in arms] == [True, True, False]
    assert arms[2].file_id == "ar.ar.vllm+kv-cache-dtype=fp8+enforce-eager"


def test_an_external_engine_takes_none_of_our_engines() -> None:
    """`engine=` in the arm is refused. `--engine` does not change the arm."""
    assert parse_arms(["hf-generate", "ar"], engines=["graph"])[0].engine is None
    with pytest.raises(UserError, match=re.escape("hf-generate is an external engine, so `engine=eager`")) as refused:
        parse_arms(["hf-generate:engine=eager"])
    assert "\n" not in str(refused.value)


def test_references_on_another_engine_are_separate_baselines() -> None:
    """Same engine: the reference on the own checkpoint, then on `ar`. Other engines: ours and external ones."""
    arms = parse_arms(
        [
            "ar:engine=eager|graph",
            "ar:on=mars,engine=graph",
            "mars:tau=0.9,engine=graph",
            "hf-generate:cache=dynamic|static",
        ]
    )
    outside = ["hf-generate@ar", "hf-generate:cache=static@ar"]
    by_name = {str(arm): arm for arm in arms}
    mars = by_name["mars:tau=0.9@mars/graph"]
    assert baselines(mars, arms) == ["ar@mars/graph", "ar@ar/graph"]
    assert engine_baselines(mars, arms) == ["ar@ar/eager", *outside]
    assert baselines(by_name["hf-generate@ar"], arms) == []
    assert engine_baselines(by_name["hf-generate@ar"], arms) == ["ar@ar/eager", "ar@ar/graph", outside[1]]


def test_a_lossless_arm_is_compared_with_plain_decoding_on_its_checkpoint() -> None:
    """On its own engine if possible, else on `eager`. `ar` is compared with `ar` on `eager`, and that with no arm."""
    arms = parse_arms(
        ["ar:engine=graph", "ar:engine=eager", "ar:on=mars,engine=graph", "hf-generate", "hf-generate:on=mars"]
    )
    held = {str(arm): reference_arm(arm, "lossless", arms) for arm in arms}
    assert held == {
        "ar@ar/graph": "ar@ar/eager",
        "ar@ar/eager": None,
        "ar@mars/graph": None,
        "hf-generate@ar": "ar@ar/eager",
        "hf-generate@mars": "ar@mars/graph",
    }
    assert reference_arm(parse_arms(["mars:engine=graph,tau=1"])[0], "lossless", arms) == "ar@mars/graph"
    assert reference_arm(parse_arms(["mars:tau=0.9"])[0], "lossy", arms) is None


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gsm8k", "gsm8k.mars-tau0.9.mars.graph.fixed.b1"),
        ("arithmetic_a:b c", "arithmetic_a_b_c.mars-tau0.9.mars.graph.fixed.b1"),
    ],
)
def test_the_id_of_a_cell_is_a_safe_file_name(name: str, file: str) -> None:
    """Any character except letters, digits and `.=+-` becomes an underscore."""
    arm = parse_arms(["mars:tau=0.9"])[0]
    assert cell_id(name, arm, 1, ignore_eos=True) == file
    refilled = cell_id(name, arm, 1, ignore_eos=True, batching="refill")
    assert refilled == file.replace("fixed.", "fixed.refill.")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mars:tau=-0.1", "tau='-0.1' is not allowed; tau is a number from 0 to 1,000, default 1."),
        ("mars:block_size=2.5", "block_size is auto or a whole number of at least 1, default 4."),
        ("mars:tau", "'tau' is not `option=value`; options of mars: tau, block_size, confidence"),
        ("mars:cache=block,extra=true", "extra=true needs cache=cursor or none"),
    ],
)
def test_the_error_for_a_wrong_value_says_what_is_allowed(spec: str, says: str) -> None:
    """The error names the value, the choices, the default and where to look."""
    with pytest.raises(UserError, match=re.escape(says)):
        parse_arms([spec])


@pytest.mark.parametrize("text", ["vllm:a=1\n2", "vllm:a=\x1b[2J", "vllm:a=\0"])
def test_an_engines_option_has_no_control_characters(text: str) -> None:
    """It is in the arm's name, in tables and in commands."""
    with pytest.raises(ValueError, match="without control characters"):
        EngineOption.read(text)
