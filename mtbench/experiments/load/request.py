"""The request of a load. `mtbench load` and `mtbench.load` have these options.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from mtbench.errors import UserError
from mtbench.options import common, texts
from mtbench.options.common import COMPARED, LOAD
from mtbench.options.fields import option
from mtbench.plan.request import DEMONSTRATION, SamplingOptions, TimedSession
from mtbench.records import Size

Positive = Annotated[float, Field(gt=0, le=1e6)]
LimitName = Literal["ttft", "tpot", "e2e"]
Limits = Mapping[LimitName, Positive]  # of one request, in seconds; those of a race are of 95th percentiles


class LoadRequest(SamplingOptions):
    """The prompts, and the servers that get them."""

    suite: common.Suite = DEMONSTRATION
    method: Annotated[
        Sequence[str],
        option(
            "Method that this command serves, such as 'mars:tau=1|0.95'. Repeatable.",
            COMPARED,
        ),
    ] = ()
    url: Annotated[
        Mapping[str, str],
        option(
            "NAME=URL of a server that runs already, ending in /v1; NAME=URL=VARIABLE if the environment "
            "variable has its key. Repeatable.",
            COMPARED,
            parse_all=list,
            show=texts.pairs,
            resumable=True,
        ),
    ] = Field(default_factory=dict)
    key_env: Mapping[str, str] = Field(
        default_factory=dict, description="environment variable with the key of a given server, by the server's name"
    )
    family: common.Family = None
    model: common.Model = None
    checkpoint: common.Checkpoints = Field(default_factory=dict)
    engine: Annotated[
        Sequence[str],
        option(
            "What a method runs in: graph, eager or invariant of mtbench's own server; or a serving engine, whose "
            "server this command starts; without --method it runs plain decoding. Repeatable: every method in each. "
            "See `mtbench ls engines`.",
            COMPARED,
            min_length=1,
            flags=("--server", "--engine"),
        ),
    ] = ("graph",)
    engine_option: common.EngineOptions = ()
    prefix_cache: common.PrefixCaches = ("off",)
    dtype: common.Dtype = "auto"
    device: common.Device = "auto"
    request_rate: Annotated[
        Sequence[Positive],
        option("New requests (or conversations) a second: 1,2,4.", LOAD, parse=texts.numbers(float), show=texts.joined),
    ] = ()
    concurrency: Annotated[
        Sequence[Size],
        option(
            "Requests (or conversations) at a time, such as 1,4,16; instead of --request-rate.",
            LOAD,
            parse=texts.numbers(int),
            show=texts.joined,
        ),
    ] = ()
    poisson: Annotated[bool, option("Poisson arrivals; default: constant gaps.", LOAD)] = False
    duration_s: Annotated[
        Positive,
        option(
            "Time in which a point's requests are sent, such as 30s, with --request-rate.",
            LOAD,
            flags=("--duration",),
            parse=texts.seconds,
            show=texts.shown_seconds,
        ),
    ] = 30.0
    requests: Annotated[Size | None, option("Requests (or conversations) a point; default: rate × time.", LOAD)] = None
    rounds: Annotated[common.Rounds, Field(description="How often every point is run; intervals of times need 5.")] = 5
    slo: Annotated[
        Limits,
        option(
            "Limits of goodput, such as ttft=500ms,tpot=50ms,e2e=5s (tpot: time per later token); default: every "
            "answer is good.",
            LOAD,
            metavar="LIMITS",
            parse=texts.latency_limits(get_args(LimitName)),
            show=texts.shown_limits,
        ),
    ] = Field(default_factory=dict)
    limit: Annotated[common.ItemLimit, Field(description="Most items of the suite; default: as many as are sent.")] = (
        None
    )
    max_num_seqs: common.MaxNumSeqs = 8
    max_queue: common.MaxQueue = 64
    max_new_tokens: common.MaxNewTokens = None
    request_timeout_s: common.RequestTimeout = 300.0
    seed: Annotated[common.Seed, Field(description="Random seed for the order of items, arms and arrivals.")] = 0
    chat_template_date: common.ChatTemplateDate = None
    data_dir: common.DataDir = None
    offline: common.Offline = False
    allow_unsandboxed_code: common.AllowUnsandboxedCode = False
    max_loss: common.MaxLoss = 2.0

    @property
    def levels(self) -> list[float]:
        """The rates, or the concurrency levels, in their order."""
        return list(self.request_rate or map(float, self.concurrency))

    @model_validator(mode="before")
    @classmethod
    def _split_urls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("url"), list | tuple):
            return given
        urls, keys = parse_urls(given["url"])
        return {**given, "url": urls, "key_env": keys}


class LoadSession(TimedSession):
    """How one call carries out a load."""

    dry_run: common.DryRun = False
    time_budget_s: Annotated[
        common.TimeBudget, Field(description="Start no point after 90s, 30m or 2h; continue with --resume.")
    ] = None


def parse_urls(texts: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return name -> URL, and name -> environment variable of its key, of every NAME=URL or NAME=URL=VARIABLE.

    Raises UserError for other text, or a URL with a user or password.
    """
    found: dict[str, str] = {}
    keys: dict[str, str] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        url, equals, variable = rest.partition("=")
        if equals and not variable.isidentifier():
            raise UserError(
                f"--url {name}: {variable!r} is no name of an environment variable; write NAME=URL=VARIABLE, such as "
                "`--url vllm=http://127.0.0.1:8000/v1=VLLM_KEY`."
            )
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if not name or parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise UserError(
                f"--url {text!r} is not NAME=URL, without user and password, such as "
                "`--url vllm=http://127.0.0.1:8000/v1`."
            )
        if name in found:
            raise UserError(f"--url {name!r} is given twice; give each server a name of its own.")
        found[name] = url.rstrip("/")
        if equals:
            keys[name] = variable
    return found, keys
