"""plan.json as records: everything that generation needs, so that a GPU node needs no network, lm-eval or datasets.

The prompts of private suites are the exception: no file holds them (mtbench/plan/prompts.py).

A **cell** is suite × arm × batch size × batching. The cells that differ only in the arm form a **group**: they share
the same **blocks** (fixed lists of prompts) and run next to each other inside every block, in random order. A static
block is one batch. A refilled block has at least eight prompts per row. Round 1 covers all blocks
and yields the generations that are scored. Later rounds repeat the first blocks for timing.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from mtbench.decoding.arms import is_served
from mtbench.decoding.method import Claims, Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.evaluation.answer_format import AnswerFormat
from mtbench.evaluation.registry import SUITES
from mtbench.models.thinking import Thinking
from mtbench.options.classes import decoding_options
from mtbench.options.common import MOST_NEW_TOKENS, MOST_ROWS
from mtbench.options.common import Batching as Batching
from mtbench.options.common import Protocol as Protocol
from mtbench.options.engine_options import PREFIX_CACHE, ServerOption
from mtbench.plan.formats import Committed
from mtbench.plan.request import CHECKPOINTS
from mtbench.plan.request import REFILLS as REFILLS
from mtbench.plan.request import RunRequest as RunRequest
from mtbench.records import CellName, Record, Sha256, Share, StoredCount, StoredSeconds, TokenId, VersionOne

Length = Literal["natural", "fixed"]

SCHEMA_VERSION: Literal[1] = 1
MIN_BLOCKS = 6  # blocks that an interval needs
LEARNS = "drafts from the texts of earlier requests, too, so that their order matters"  # a flag of cells
OTHER_RULE = "sampled by a rule of its engine that changes the distribution"  # a flag of cells
FREE = "answers are not constrained: its engine takes no JSON schema"  # a flag of cells
APART = "decoded alone, with intervals over rounds"  # a flag of cells
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Budget = Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)]

CELL_ID = "name of the cell: suite.method[-optVALUE…].on.engine.[fixed.][refill.]bN"
ENGINE_OPTIONS = Field(
    default_factory=list[ServerOption],
    description="options of its engine's server, NAME or NAME=VALUE, beside mtbench's own",
)


def _without_token_map(options: dict[str, Any]) -> dict[str, Any]:
    # Earlier versions wrote it, null where a draft had no token map; another value is refused as an unknown option.
    return {name: value for name, value in options.items() if (name, value) != ("token_map", None)}


OptionValues = Annotated[dict[str, Any], AfterValidator(_without_token_map)]
OTHER_TOKENS = Field(
    default_factory=list[ServerOption],
    description="of these, those for which it may have other tokens than its method promises; empty: none",
)


class Item(Record):
    """One tokenised prompt."""

    item: str = Field(description="name of the item: <task>/<doc id>/<turn>")
    prompt_ids: list[TokenId] = Field(
        description="token ids of the prompt; of a later turn, those that follow the previous answer, or those behind "
        "the `shared` ones. Empty in the file of a private suite, whose prompts are loaded again when the run decodes"
    )
    stop: list[str] = Field(description="strings that end the decoding of the item")
    cut: list[str] = Field(default_factory=list, description="strings that cut the text when it is scored")
    follows: StoredCount | None = Field(
        None, description="of a later turn, the index of the item whose answer comes before; null: first turn"
    )
    shared: StoredCount | None = Field(
        None,
        description="of a later turn of a recorded conversation, the leading tokens that its prompt has in common with "
        "that of the turn before; null: its prompt holds the arm's own answers, or it is a first turn",
    )
    scored: bool = Field(True, description="false: the item has no answer to compare with, so it has no score")
    answer_format: StoredCount | None = Field(
        None, description="index of what its answer must be, in the suite's answer_formats; null: any text"
    )
    think_s: StoredSeconds = Field(
        0.0, description="time between the answer to the previous turn and this prompt, in a load, in seconds"
    )


class SuitePlan(Record):
    """A suite with its prompts. The prompts of a private suite are never written."""

    suite: str = Field(description="suite as requested, name or name:rest")
    family: str = Field(description="family of checkpoints")
    task: dict[str, Any] = Field(description="the suite's own description of its task")
    metric: str | None = Field(description="metric of the score; null: the suite is not scored")
    max_new_tokens: Budget = Field(description="most tokens of an answer")
    flags: list[str] = Field(description="remarks that hold for every cell of the suite")
    items: list[Item] = Field(min_length=1, description="items with their prompts")
    answer_formats: list[AnswerFormat] = Field(default_factory=list, description="what answers must be")
    thinking: Thinking | None = Field(None, description="tokens between which the model thinks; null: it has none")
    withheld: str | None = Field(
        None, description="of a private suite, the SHA-256 of the prompts that no file holds; null: not private"
    )

    @model_serializer(mode="wrap")
    def _without_private_prompts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stored: dict[str, Any] = handler(self)
        if self.withheld:
            stored["items"] = [item | {"prompt_ids": []} for item in stored["items"]]
        return stored

    def prompt(self, index: int, answers: Mapping[str, Sequence[int]] = MappingProxyType({})) -> list[int]:
        """Return the prompt of an item. `answers`: answers to earlier turns, by item; a missing one counts as empty."""
        ids: list[int] = []
        answer: Sequence[int] = ()
        for turn in self._turns(index):
            item = self.items[turn]
            ids += answer  # a recorded turn shares the prompt only
            ids[len(ids) if item.shared is None else item.shared :] = item.prompt_ids
            answer = answers.get(item.item, ())
        return ids

    def _turns(self, index: int) -> list[int]:
        """Return the turns of an item's conversation up to the item, the first one first."""
        turns = [index]
        while (before := self.items[turns[-1]].follows) is not None:
            turns.append(before)
        return turns[::-1]

    def is_fixed(self, index: int) -> bool:
        """Return whether the prompt of an item does not depend on the arm: a first turn, or of a recorded one."""
        return all(self.items[turn].shared is not None for turn in self._turns(index)[1:])

    def first_turn(self, index: int) -> int:
        """Return the first turn of an item's conversation."""
        return self._turns(index)[0]

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of items whose answers must meet one."""
        formats = {i.item: self.answer_formats[i.answer_format] for i in self.items if i.answer_format is not None}
        return {item: wanted.json_schema for item, wanted in formats.items() if wanted.json_schema is not None}

    def constrained(self, engine: str | None) -> set[str]:
        """Return the items whose answers an engine holds to a JSON schema, whatever the model prefers."""
        found = set(self.schemas)  # first: a stored run without any needs no plugin of its engine
        return found if found and is_served(engine) and SERVING_ENGINES[engine].constraint is not None else set()

    @property
    def positions(self) -> list[int]:
        """Most positions that each item can take, answers included."""
        taken: list[int] = []
        for item in self.items:
            before = 0 if item.follows is None else taken[item.follows] if item.shared is None else item.shared
            taken.append(before + len(item.prompt_ids) + self.max_new_tokens)
        return taken

    @property
    def room(self) -> int:
        """Positions that any item fits in: batches that have as many have one shape."""
        return max(self.positions)

    @property
    def scored_items(self) -> set[str]:
        """The items that get a score, if the suite has a metric."""
        return {item.item for item in self.items if item.scored}

    def is_whole(self, limit: int | None) -> bool:
        """Return whether no larger limit could give more items."""
        tasks = Counter(item.item.partition("/")[0] for item in self.items if item.follows is None)
        return limit is None or max(tasks.values()) < limit

    def digest(self) -> str:
        """SHA-256 of all prompts."""
        return hashlib.sha256(json.dumps([[i.item, i.prompt_ids] for i in self.items]).encode()).hexdigest()


class Script(Record):
    """The acceptance of a simulated cell."""

    source: str = Field(description="probabilities or length that the acceptance comes from")
    lengths: list[Budget] = Field(description="tokens of each item's answer")
    seed: int = Field(description="seed of drawn commits")
    scripts: list[list[Committed]] | None = Field(
        description="per item, the tokens that each forward commits; null: they are drawn, or one per forward"
    )
    probabilities: list[Share] | None = Field(
        description="per depth, the probability that a mask is accepted once all before it were; null: not drawn"
    )


class Simulated(Record):
    """The simulated parts of a cell."""

    weights: str | None = Field(description="random:SHAPE of random weights; null: real weights")
    accept: str | None = Field(description="probabilities or length that script the acceptance; null: no script")
    note: str | None = Field(description="remark on the simulated acceptance; null: no remark")


class Cell(Record):
    """One arm on one suite at one batch size, with one way of batching."""

    cell: CellName = Field(description=CELL_ID)
    suite: str = Field(description="suite as requested, name or name:rest")
    arm: str = Field(description="arm: method:options@role/engine")
    method: str = Field(description="name of the method")
    options: OptionValues = Field(description="value of every option of the method, resolved for the checkpoint")
    on: str = Field(description="role of the checkpoint that decodes")
    engine: str | None = Field(description="engine; null: the method's loop is not ours")
    family: str = Field(description="family of checkpoints")
    checkpoints: dict[str, str] = Field(description=CHECKPOINTS)
    batch_size: Rows = Field(description="requests decoded side by side")
    length: Length = Field(description="natural: answers end by themselves; fixed: end tokens are ignored")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    flags: list[str] = Field(description="remarks on the cell, known when it was planned")
    baselines: list[str] = Field(
        description="arms by the same engine that it is compared with: the reference on its own checkpoint and the "
        "reference on the family's own"
    )
    lossless_reference: str | None = Field(description="arm whose tokens it promises; null: none")
    claims: Claims = Field(
        description="lossless: the reference's tokens; distribution: other tokens of the same distribution; lossy: "
        "neither"
    )
    demonstration: bool = Field(description="true: the family shows the mechanics and is no evidence on real models")
    engine_baselines: list[str] = Field(
        default_factory=list,
        description="references by another engine that it is compared with: the ratio contains the engine's part",
    )
    accept: Script | None = Field(None, description="acceptance that it is made to have; null: its own")
    simulated: Simulated | None = Field(None, description="what is not real about it; null: nothing")
    fault: str | None = Field(
        None, description="error of the method when the cell was planned, so that the cell is not run; null: none"
    )
    schedule: list["Cell"] = Field(
        default_factory=list,
        description="of a server that takes more requests than the cell sends: the cells that it decodes as from their "
        "batch sizes on; the last one is the most that it takes; empty: it is the cell's own",
    )
    engine_options: list[ServerOption] = ENGINE_OPTIONS
    other_tokens: list[ServerOption] = OTHER_TOKENS
    revision: str | None = Field(None, description="commit on the hub of the checkpoint that decodes; null: not known")
    alternative: bool = Field(False, description="true: plain decoding in its engine has other options of the server")
    gpu_bytes: StoredCount | None = Field(
        None, description="bytes of a GPU's memory that its server may take; null: it is not on a GPU, or not known"
    )

    @property
    def built(self) -> Method:
        """Its method with its options."""
        method: Method = METHODS[self.method](**self.options)
        return method

    @property
    def prefix_cache(self) -> bool:
        """Whether its server keeps the prompts of a conversation."""
        return PREFIX_CACHE in self.engine_options

    @property
    def is_reference(self) -> bool:
        """Whether it is plain decoding, with which other cells are compared."""
        method = METHODS[self.method]
        return method.reference and not decoding_options(method, self.options) and not self.alternative

    @property
    def served_as(self) -> Sequence["Cell"]:
        """The cells that its server decodes as."""
        return self.schedule or [self]

    @property
    def computes_here(self) -> bool:
        """Whether it decodes in a process of mtbench, on weights that are loaded there."""
        return METHODS[self.method].needs_weights and not is_served(self.engine)


class Group(Record):
    """The cells that share blocks."""

    suite: str = Field(description="suite as requested")
    batch_size: Rows = Field(description="requests decoded side by side")
    blocks: list[Annotated[list[StoredCount], Field(min_length=1)]] = Field(
        min_length=1, description="per block, indices into the suite's items"
    )
    rounds: list[StoredCount] = Field(min_length=1, description="per round, how many of the first blocks it runs")
    cells: list[CellName] = Field(min_length=1, description="names of the cells")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")

    @property
    def name(self) -> str:
        """Its name in race.json."""
        return f"{self.suite} b{self.batch_size}"


class Plan(Record):
    """plan.json: everything that generation needs. It holds prompts as token ids, cells, blocks and rounds."""

    schema_version: VersionOne = Field(description="version of this format")
    request: RunRequest = Field(description="options of `mtbench run`")
    suites: list[SuitePlan] = Field(description="suites with their prompts")
    cells: list[Cell] = Field(description="cells, group by group")
    groups: list[Group] = Field(description="groups of cells that share blocks")
    plugins: dict[str, Sha256] = Field(
        default_factory=dict,
        description="SHA-256 of each file that registered a method or a suite of this plan, by path",
    )
    publication: str | None = Field(
        None, description="published table that the results are compared with, by name; null: none"
    )
    gpu_bytes: StoredCount | None = Field(
        None, description="bytes of a GPU's memory for mtbench's own arms beside servers; null: no server is on a GPU"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_token_maps(cls, stored: Any) -> Any:
        # Earlier versions wrote it, empty where no draft had a token map; a full one is refused as an unknown key.
        if isinstance(stored, dict) and stored.get("token_maps") == {}:
            return {name: value for name, value in stored.items() if name != "token_maps"}
        return stored

    def cell(self, name: str) -> Cell:
        return next(c for c in self.cells if c.cell == name)

    def suite(self, name: str) -> SuitePlan:
        return next(s for s in self.suites if s.suite == name)

    def group(self, cell: str) -> Group:
        return next(group for group in self.groups if cell in group.cells)

    def requests(
        self,
        suite: SuitePlan,
        items: Sequence[int],
        answered: Mapping[str, Sequence[int]] = MappingProxyType({}),
        max_new_tokens: int | None = None,
        cache: str | None = None,
    ) -> list[Request]:
        """Return the requests of some of a suite's items, by number.

        `answered`: by item, the answers that later turns follow. `max_new_tokens`: the suite's by default. `cache`: the
        turns of a conversation may use its cached prompts, those with the same text here; None: no cache.
        """
        schemas = suite.schemas
        return [
            Request(
                prompt_ids=suite.prompt(number, answered),
                max_new_tokens=suite.max_new_tokens if max_new_tokens is None else max_new_tokens,
                stop=suite.items[number].stop,
                seed=self.item_seed(number),
                item=number,
                cache=None if cache is None else f"{cache}.{suite.first_turn(number)}",
                begins=suite.items[number].follows is None,
                json_schema=schemas.get(suite.items[number].item),
            )
            for number in items
        ]

    def item_seed(self, number: int) -> int:
        """Return the random seed of a suite's n-th item: the same for all arms of a run."""
        return ((self.request.seed << 32) + number) % (1 << 63)

    @property
    def too_small(self) -> dict[str, str]:
        """The groups that have too few blocks for an interval, by name, and what would give them enough."""
        few = [] if self.request.apart else [group for group in self.groups if self._begun(group) < MIN_BLOCKS]
        return {group.name: self._too_few_blocks(group) for group in few}

    def warnings(self) -> list[str]:
        """The parts that cannot get a verdict."""
        sentences = [*self.too_small.values()]
        sentences += [f"{suite.suite}: {flag}" for suite in self.suites for flag in suite.flags]
        sentences += [
            f"{suite.suite}: {without} of {len(suite.items)} items have no answer to compare with: they are timed, and "
            "accuracy is that of the others"
            for suite in self.suites
            if suite.metric is not None and (without := len(suite.items) - len(suite.scored_items))
        ]
        if subtasks := set(self.request.subtask):
            whole = [s.suite for s in self.suites if subtasks.isdisjoint(SUITES[s.suite.partition(":")[0]].subtasks)]
            sentences += [f"{suite} runs completely: --subtask names no subtask of it" for suite in whole]
        if self.request.chat_template_date and not any("template_date" in suite.task for suite in self.suites):
            sentences.append("--chat-template-date changes nothing: no chat template reads the clock")
        if self.request.sampling_source == "model" and not self.request.temperature:
            sentences.append("--sampling model is greedy here: the checkpoint's settings have no `do_sample: true`")
        given = Counter(self.request.method)
        sentences += [f"`--method {spec}` is given {n} times" for spec, n in given.items() if n > 1]
        if "refill" not in self.request.batching:
            return sentences
        if 1 in self.request.batch_size:
            sentences.append("batch size 1 has nothing to refill: it has no refilled cells")
        named = {spec.partition(":")[0] for spec in self.request.method} or set(METHODS)
        if static_only := sorted(name for name in named if METHODS[name].outside):
            sentences.append(f"{', '.join(static_only)}: static batches only, since the loop is not ours; no refill")
        return sentences

    def _begun(self, group: Group) -> int:
        """Return the blocks of first turns of a group: those of later turns are of the same conversations."""
        items = self.suite(group.suite).items
        return sum(items[block[0]].follows is None for block in group.blocks)

    def _too_few_blocks(self, group: Group) -> str:
        batching = "" if group.batching == "static" else f", {group.batching}"
        suite, begun = self.suite(group.suite), self._begun(group)
        what, of = ("item", "") if begun == len(group.blocks) else ("conversation", " of conversations")
        items = MIN_BLOCKS * group.batch_size * (1 if group.batching == "static" else REFILLS)
        remedy = "; raise `--limit`"
        if suite.is_whole(self.request.limit):
            there = sum(item.follows is None for item in suite.items)
            remedy = f", and there are {there}; add prompts, or lower `--batch-size`"
        found = f"{begun} of {MIN_BLOCKS} blocks{of}; {MIN_BLOCKS} take {items} {what}s{remedy}"
        return f"{group.suite} at batch size {group.batch_size}{batching}: inconclusive: {found}"
