"""What a plan asks: suites are opened, their prompts written by the checkpoint's template and tokenised.

Prompts that no file may hold (`Suite.private`) are asked again of their suite by whoever decodes.
"""

from collections.abc import Sequence
from pathlib import Path

from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, Template, answering
from mtbench.models.families import Family
from mtbench.models.loading import Inspected, inspect
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import Item, Plan, RunRequest, SuitePlan, read_plan


def open_suite(spec: str, request: RunRequest) -> Suite:
    """The suite `name:rest`, with its data source. Raises UserError."""
    name, _, rest = spec.partition(":")
    source = Source(
        data_dir=Path(request.data_dir) if request.data_dir else None,
        offline=request.offline,
        seed=request.seed,
        subtasks=tuple(subtask for subtask in SUITES[name].subtasks if subtask in request.subtask),
        skip_unscorable=request.skip_unscorable,
        unsandboxed=request.allow_unsandboxed_code,
    )
    with answering(spec):
        suite: Suite = SUITES[name](rest, source)
    return suite


def refuse_unknown_subtasks(request: RunRequest) -> None:
    """Raise UserError for a subtask that none of the suites has; a suite with none of those named is asked whole."""
    known = dict.fromkeys(subtask for spec in request.suite for subtask in SUITES[spec.partition(":")[0]].subtasks)
    for subtask in request.subtask:
        if not known:
            raise UserError(f"--subtask {subtask!r}: {', '.join(request.suite)} is not made of several; leave it out.")
        if subtask not in known:
            raise unknown("subtask", subtask, known, "mtbench ls suites")


def plan_suite(
    spec: str, suite: Suite, family: Family, checkpoints: Sequence[Inspected], request: RunRequest
) -> SuitePlan:
    """What the suite asks, in the checkpoints' tokens. Raises UserError if they do not read the same, or cannot."""
    tokenizer = checkpoints[0].tokenizer
    with answering(spec):
        prompts = suite.prompts(_template(checkpoints[0]), request.limit)
        items = _items(prompts, checkpoints[0], request.protocol)
    if not items:
        raise UserError(f"suite {spec!r} has no items.")
    if empty := [i.item for i in items if not i.prompt_ids]:
        raise UserError(f"{empty[0]} is an empty prompt; there is nothing to continue.")
    for other in checkpoints[1:]:
        words = other.tokenizer.get_vocab()
        if odd := [w for w, i in tokenizer.get_vocab().items() if words.get(w, i) != i]:
            raise UserError(
                f"checkpoints {checkpoints[0].source!r} and {other.source!r} have different ids for {odd[0]!r}, so "
                "they would not read the same prompts; give checkpoints of one family with `--checkpoint`."
            )
        if _ids(prompts[:1], other) != [items[0].prompt_ids]:
            raise UserError(
                f"checkpoints {checkpoints[0].source!r} and {other.source!r} split {items[0].item} into different "
                "tokens, so their counts cannot be compared; give checkpoints of one family with `--checkpoint`."
            )
    planned = SuitePlan(
        suite=spec,
        family=family.name,
        task=dict(suite.task),
        metric=suite.metric,
        max_new_tokens=request.max_new_tokens or suite.max_new_tokens,
        flags=["out of domain"] if family.domain not in (None, suite.name) else [],
        items=items,
    )
    _refuse_too_long(planned, checkpoints)
    return planned.changed(withheld=planned.digest()) if suite.private else planned


def open_plan(run: RunDirectory, data_dir: str | None = None) -> Plan:
    """The plan of a run; prompts that no file holds are asked of their suites again.

    `data_dir`: where their data is, if elsewhere than the plan says. Raises UserError if they cannot be had here, or
    are not those that were planned.
    """
    plan = read_plan(run)
    request = plan.request.changed(data_dir=data_dir) if data_dir else plan.request
    suites = []
    for suite in plan.suites:
        if suite.withheld is not None:
            cells = [cell for cell in plan.cells if cell.suite == suite.suite]
            checkpoint = inspect(next(iter(cells[0].checkpoints.values())), offline=request.offline, needs_mask=False)
            asked = open_suite(suite.suite, request)
            with answering(suite.suite):
                prompts = asked.prompts(_template(checkpoint), request.limit)
                suite = suite.changed(items=_items(prompts, checkpoint, request.protocol))
            if suite.digest() != suite.withheld:
                raise UserError(
                    f"suite {suite.suite!r} no longer asks what was planned in {str(run.path)!r}; find its data of "
                    "then (`--data-dir`), or start another run with `mtbench run -o DIR`."
                )
        suites.append(suite)
    return plan.changed(suites=suites)


def _template(checkpoint: Inspected) -> Template:
    """How a checkpoint writes conversations; one without a chat template, as paragraphs."""
    tokenizer = checkpoint.tokenizer

    def template(messages: Messages) -> str:
        if tokenizer.chat_template is None:
            return "\n\n".join(m["content"] for m in messages)
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    return template


def _refuse_too_long(suite: SuitePlan, checkpoints: Sequence[Inspected]) -> None:
    longest = max(range(len(suite.items)), key=suite.positions)
    needed, budget = suite.positions(longest), suite.max_new_tokens
    turns = 1
    while (before := suite.items[longest].follows) is not None:
        longest, turns = before, turns + 1
    tokens = needed - turns * budget
    for checkpoint in checkpoints:
        if needed > checkpoint.max_positions:
            left = (checkpoint.max_positions - tokens) // turns
            raise UserError(
                f"{suite.items[longest].item} has {tokens} prompt tokens{f' in {turns} turns' if turns > 1 else ''}, "
                f"which with {budget} new ones{' each' if turns > 1 else ''} do not fit the context of "
                f"{checkpoint.source!r} ({checkpoint.max_positions}); "
                + (f"lower `--max-new-tokens` to {left}, or " if left > 0 else "")
                + f"shorten the prompts of `--suite {suite.suite}`."
            )


def _items(prompts: Sequence[Prompt], checkpoint: Inspected, protocol: str) -> list[Item]:
    """Prompts with their tokens. Raises ValueError for a turn that follows none."""
    place = {prompt.item: i for i, prompt in enumerate(prompts)}
    if lost := [p.follows for p in prompts if p.follows is not None and p.follows not in place]:
        raise ValueError(f"a prompt follows {lost[0]!r}, which is none")
    late = protocol == "paper"
    return [
        Item(
            item=prompt.item,
            prompt_ids=ids,
            stop=[] if late else list(prompt.stop),
            cut=list(prompt.stop) if late else [],
            follows=None if prompt.follows is None else place[prompt.follows],
        )
        for prompt, ids in zip(prompts, _ids(prompts, checkpoint), strict=True)
    ]


def _ids(prompts: Sequence[Prompt], checkpoint: Inspected) -> list[list[int]]:
    """The prompts' tokens. Raises UserError if one is to have more of them than its text gives."""
    texts = [prompt.text for prompt in prompts]
    tokens = checkpoint.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    for prompt, ids in zip(prompts, tokens, strict=True):
        if prompt.tokens is not None and len(ids) < prompt.tokens:
            raise UserError(
                f"{prompt.item} is to have {prompt.tokens} tokens, but its text is only {len(ids)} to the tokenizer of "
                f"{checkpoint.source!r}; take another suite, such as `--suite prompts:FILE.jsonl`."
            )
    return [ids[: prompt.tokens] for prompt, ids in zip(prompts, tokens, strict=True)]
