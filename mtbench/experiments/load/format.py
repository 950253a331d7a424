"""plan.json, points.jsonl and load.json of `mtbench load` as records.

An **arm** is a server: one that this command starts for a method, or a given URL. A **level** is a request rate or a
number of concurrent requests. A **point** is one arm at one level in one round: one process of the client.
"""

from typing import Any, Literal

from pydantic import Field

from mtbench.experiments.load.request import LoadRequest as LoadRequest
from mtbench.experiments.load.request import Positive
from mtbench.options.engine_options import ServerOption
from mtbench.plan.formats import Environment
from mtbench.records import Count, NonNegative, Record, Sha256, Size, StoredSeconds, Text
from mtbench.results.figure_formats import Estimate, Verdict

SCHEMA_VERSION: Literal[2] = 2  # of plan.json

Outcome = Literal["ok", "rejected", "failed"]
Unit = Literal["request", "conversation"]
UNIT = "what a level and --requests count: a conversation is all requests of its turns, in order"
LEVEL = "requests (or conversations) per second, or at a time"


class ArmPlan(Record):
    """A server that gets load."""

    name: Text = Field(description="name of the arm")
    method: str | None = Field(None, description="method with its options, as `mtbench serve` gets it; null: a URL")
    engine: str | None = Field(None, description="serving engine whose server is started; null: mtbench's, or a URL")
    engine_options: list[ServerOption] = Field(
        default_factory=list, description="options of that engine's server, NAME or NAME=VALUE, beside mtbench's own"
    )
    url: str | None = Field(None, description="URL of a given server; null: this command starts it")
    key_env: str | None = Field(None, description="environment variable with the server's key; null: it wants none")


class LoadItem(Record):
    """A prompt of the suite."""

    item: Text = Field(description="name of the item: <task>/<doc id>/<turn>")
    prompt: Text = Field(description="text that the server continues: it adds the tokenizer's special tokens")
    prompt_tokens: Size = Field(description="its tokens")
    cut: list[str] = Field(description="strings that cut the answer when it is scored")
    scored: bool = Field(True, description="false: the item has no answer to compare with, so it has no score")
    turn: Size = Field(1, description="its turn in its conversation, from 1")
    think_s: StoredSeconds = Field(0.0, description="time from the answer to the turn before until it is sent")


class PointPlan(Record):
    """One process of the client."""

    point: Text = Field(description="name of the point")
    round: Count = Field(description="round, from 1")
    arm: Text = Field(description="name of the arm")
    level: Positive = Field(description=LEVEL)
    seed: int = Field(description="seed of the arrivals; the same for all arms")
    items: list[Count] = Field(min_length=1, description="items in the order in which they are sent, as indices")


class LoadPlan(Record):
    """plan.json of a load: prompts, arms and points, in the order in which they are run."""

    schema_version: Literal[2] = Field(description="version of this format")
    request: LoadRequest = Field(description="the request")
    family: str = Field(description="family of checkpoints")
    tokenizer: str = Field(description="path or hub id of the checkpoint whose tokenizer and chat template are used")
    task: dict[str, Any] = Field(description="the suite's own description of its task")
    metric: str | None = Field(description="metric of the score; null: the suite is not scored")
    max_new_tokens: Size = Field(description="most tokens of an answer")
    room: Size = Field(description="positions that every prompt with its answer fits in")
    stop: list[str] = Field(description="strings that end every answer; empty: none, or they differ by item")
    arms: list[ArmPlan] = Field(min_length=1, description="the servers, the one to compare with first")
    items: list[LoadItem] = Field(min_length=1, description="the prompts")
    fields: dict[str, bool] = Field(default_factory=dict, description="what every request has beside prompt and budget")
    flags: list[str] = Field(default_factory=list, description="remarks that hold for every arm")
    points: list[PointPlan] = Field(min_length=1, description="the points")
    unit: Unit = Field("request", description=UNIT)
    plugins: dict[str, Sha256] = Field(
        default_factory=dict, description="SHA-256 of each file that registered a method or the suite, by path"
    )

    def arm(self, name: str) -> ArmPlan:
        """Return an arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)


class RequestLine(Record):
    """A request as the client saw it, with the server's counts."""

    position: Count = Field(description="its place in the point's items")
    item: Text = Field(description="name of the item")
    outcome: Outcome = Field(description="ok; rejected: the server was full (429 or 503); failed: any other error")
    error: str | None = Field(description="the client's error; null: none")
    start_s: StoredSeconds = Field(description="when it was sent, after the first request of the point")
    e2e_s: StoredSeconds | None = Field(description="time to its last token; null: not answered")
    ttft_s: StoredSeconds | None = Field(description="time to its first token; null: not answered")
    tpot_s: StoredSeconds | None = Field(description="time per later token, by the client's formula; null: one token")
    tokens: Count | None = Field(description="tokens of the answer, as the server counts them; null: not reported")
    text: str | None = Field(description="the answer; null: not answered")
    forwards: Count | None = Field(description="forward passes in which the request had a row; null: not reported")
    turn: Size = Field(1, description="its turn in its conversation, from 1")
    prompt_tokens: Count | None = Field(None, description="tokens of its prompt, as the plan has them")
    cached_tokens: Count | None = Field(None, description="of these, those that were cached; null: not reported")


class PointLine(Record):
    """A line of points.jsonl: a point that has ended."""

    point: Text = Field(description="name of the point")
    round: Count = Field(description="round, from 1")
    arm: Text = Field(description="name of the arm")
    level: Positive = Field(description=LEVEL)
    started: str = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    window_s: StoredSeconds = Field(
        description="from the first request to the last answer, or requests / rate where that is longer"
    )
    energy_j: NonNegative | None = Field(description="energy of the GPU in the client's time; null: not measured")
    throttled_s: StoredSeconds | None = Field(None, description="time stopped by a CPU quota; null: there is none")
    requests: list[RequestLine] = Field(description="its requests in the order of the items")


class Latency(Record):
    """Percentiles of a time, each the mean over rounds, in seconds."""

    p50: Estimate = Field(description="median")
    p95: Estimate = Field(description="95th percentile")
    p99: Estimate = Field(description="99th percentile")


class LoadCell(Record):
    """One arm at one level: counts over all rounds, and estimates."""

    arm: Text = Field(description="name of the arm")
    level: Positive = Field(description=LEVEL)
    rounds: Count = Field(description="rounds that were run")
    sent: Count = Field(description="requests that were sent")
    ok: Count = Field(description="requests that were answered")
    rejected: Count = Field(description="requests that a full server refused")
    failed: Count = Field(description="requests that ended with another error")
    good: Count = Field(description="requests that were answered within all limits")
    good_and_correct: Count | None = Field(description="of these, with a score of at least 0.5; null: not scored")
    achieved_rate: Estimate = Field(description="answered requests per second")
    goodput: Estimate = Field(description="requests per second that were answered within all limits")
    correct_goodput: Estimate | None = Field(description="of these, those answered correctly; null: not scored")
    tokens_per_s: Estimate = Field(description="tokens of the answers per second")
    ttft: Latency = Field(description="time to the first token")
    tpot: Latency = Field(description="time per later token, by the client's formula")
    e2e: Latency = Field(description="time to the last token")
    accuracy: Estimate | None = Field(description="mean score of the answered items; null: not scored")
    items: Count = Field(description="different items that were answered; one answered again counts once")
    tokens_per_forward: Estimate | None = Field(
        description="tokens per forward pass of a row; null: the server does not tell it"
    )
    j_per_token: Estimate | None = Field(description="energy per token of an answer; null: not measured")
    flags: list[str] = Field(description="remarks")
    cached_share: Estimate | None = Field(None, description="cached tokens of the prompts over all; null: not reported")
    turn: str | None = Field(None, description="turns of conversations whose requests these are; null: all")
    turns: list["LoadCell"] = Field(default_factory=list, description="the same by turn; empty: of single prompts")


class Comparison(Record):
    """An arm against an earlier one at a level. Ratios over 1 favour the arm."""

    level: Positive = Field(description=LEVEL)
    baseline: Text = Field(description="arm that is compared with")
    arm: Text = Field(description="arm that is compared")
    speedup: Estimate = Field(
        description="the baseline's time to the last token over the arm's, on the requests that both answered"
    )
    speed_verdict: Verdict = Field(description="verdict on it")
    goodput_ratio: Estimate = Field(description="the arm's goodput over the baseline's")
    goodput_verdict: Verdict = Field(description="verdict on it")
    accuracy_difference: Estimate | None = Field(description="on the items that both answered; null: not scored")
    accuracy_verdict: Verdict | None = Field(description="verdict on it; null: not scored")
    items: Count = Field(description="items that both answered")


class ServerFacts(Record):
    """The server of an arm."""

    name: Text = Field(description="name of the arm")
    model: str = Field(description="name of the model that it serves")
    command: list[str] | None = Field(description="command that starts it; null: a given URL")
    engine: str | None = Field(None, description="what serves, with its release; null: a given URL")
    url: str | None = Field(description="URL; null: this command started it, on a free port")


class ClientFacts(Record):
    """The program that sent the requests."""

    name: Text = Field(description="its name")
    version: str = Field(description="its version")
    formulas: dict[str, str] = Field(description="how it computes each time")


class Load(Record):
    """load.json: quality and speed of each arm at each level, from the same requests."""

    schema_version: Literal[3] = Field(description="version of this format")
    started: str = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    complete: bool = Field(description="false: points are missing; `mtbench load --resume` runs them")
    environment: Environment = Field(description="machine, versions and command")
    request: LoadRequest = Field(description="the request")
    metric: str | None = Field(description="metric of the score; null: the suite is not scored")
    unit: Unit = Field("request", description=UNIT)
    max_new_tokens: Size = Field(description="most tokens of an answer")
    client: ClientFacts = Field(description="the program that sent the requests")
    arms: list[ServerFacts] = Field(description="what answered")
    cells: list[LoadCell] = Field(description="figures by arm and level")
    comparisons: list[Comparison] = Field(description="every pair of arms at every level")
