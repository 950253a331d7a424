"""Open suites, render their prompts with the checkpoint's chat template, and tokenise them.

The plan stores the tokens, except of private suites (`Suite.private`): generation gets these prompts from the suite.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtbench.decoding.output import first_difference
from mtbench.errors import UserError, unknown
from mtbench.evaluation.answer_format import AnswerFormat
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, suite_errors
from mtbench.models import chat_template
from mtbench.models.families import Family, short_name
from mtbench.models.feature_draft import DraftConfig
from mtbench.models.loading import Inspected, inspect
from mtbench.models.thinking import Thinking
from mtbench.options.common import MOST_NEW_TOKENS
from mtbench.options.texts import joined, pairs
from mtbench.plan.plan import Item, Plan, RunRequest, SuitePlan
from mtbench.plan.run import Run

LEFT_OUT = "{:,} turns of {:,} conversations are left out: over {:,} tokens"  # a flag
READS_CLOCK = "the chat template reads the clock: {} is in every prompt (`--chat-template-date`)"  # a flag
RAW_PROMPTS = "raw prompts: the checkpoint has no chat template"  # a flag


def open_suite(spec: str, request: RunRequest) -> Suite:
    """Return the suite `name` or `name:variant` for a request. Raise UserError if it cannot be opened."""
    name, _, variant = spec.partition(":")
    source = Source(
        data_dir=Path(request.data_dir) if request.data_dir else None,
        offline=request.offline,
        seed=request.seed,
        subtasks=tuple(subtask for subtask in SUITES[name].subtasks if subtask in request.subtask),
        skip_unscorable=request.skip_unscorable,
        unsandboxed=request.allow_unsandboxed_code,
        metric=request.metric if SUITES[name].metrics else None,
    )
    with suite_errors(spec):
        suite: Suite = SUITES[name](variant, source)
    return suite


def open_suites(request: RunRequest) -> dict[str, Suite]:
    """Return the suites of a request by their names: a wrong file is found before a model is read.

    Raises UserError for a subtask or a metric that no suite has. A suite that has none of them runs as it is.
    """
    kinds = [SUITES[spec.partition(":")[0]] for spec in request.suite]
    subtasks = {name for kind in kinds for name in kind.subtasks}
    metrics = {name for kind in kinds for name in kind.metrics}
    if request.metric is not None:
        _refuse_unknown("metric", request.metric, metrics, request)
    if request.max_context is not None and not any(kind.shortens for kind in kinds):
        raise UserError(f"--max-context: {', '.join(request.suite)} has no conversations to shorten; leave it out.")
    for subtask in request.subtask:
        _refuse_unknown("subtask", subtask, subtasks, request)
    return {spec: open_suite(spec, request) for spec in request.suite}


def _refuse_unknown(kind: str, name: str, names: Collection[str], request: RunRequest) -> None:
    if not names:
        raise UserError(f"--{kind} {name!r}: {', '.join(request.suite)} has no choice of a {kind}; leave it out.")
    if name not in names:
        raise unknown(kind, name, names, "mtbench ls suites")


def plan_suite(
    spec: str,
    suite: Suite,
    family: Family,
    checkpoints: Sequence[Inspected],
    request: RunRequest,
    readers: Collection[str],
) -> SuitePlan:
    """Return the suite's prompts in the first checkpoint's tokens. `readers`: sources of those that read these.

    Raise UserError if there are none, if the readers tokenise them differently, or if one is too long.
    """
    prompts, rendered, date = prompt_texts(suite, spec, checkpoints[0], request)
    named = {id(one.answer_format): (one.answer_format, one.item) for one in prompts if one.answer_format is not None}
    for wanted, name in named.values():
        wanted.refuse_faulty(name)
    budget = request.max_new_tokens or suite.max_new_tokens
    room = min([request.max_context or MOST_NEW_TOKENS, *(one.max_positions for one in checkpoints)])
    items = _tokenise(prompts, spec, checkpoints[0], request.protocol, (room, budget) if suite.shortens else None)
    if not items:
        raise UserError(f"suite {spec!r} has no items{f' of at most {room:,} tokens' if suite.shortens else ''}.")
    kept = {item.item for item in items}
    lost = Counter(prompt.item.rpartition("/")[0] for prompt in prompts if prompt.item not in kept)
    prompts = [prompt for prompt in prompts if prompt.item in kept]
    for item in items:
        if not item.prompt_ids and not item.shared:
            raise UserError(f"{item.item} is an empty prompt; there is nothing to continue.")
    whole = [one for one in checkpoints if one.source in readers and not isinstance(one.config, DraftConfig)]
    _refuse_unknown_ids(prompts, items, checkpoints[0].tokenizer, min(whole, key=lambda one: one.vocabulary))
    for other in [other for other in checkpoints[1:] if other.source in readers]:
        _refuse_other_tokens(checkpoints[0], other, prompts[0], items[0])
    formats = _answer_formats(prompts)
    names = [*request.chat_template_kwargs, *(["tools"] if any(one.tools for one in formats) else [])]
    plan = SuitePlan(
        suite=spec,
        family=family.name,
        task=_described(suite, request, rendered, date),
        metric=suite.metric,
        max_new_tokens=budget,
        flags=[
            *suite.flags,
            *(["out of domain"] if family.domain not in (None, suite.name) else []),
            *([LEFT_OUT.format(lost.total(), len(lost), room)] if lost else []),
            *([READS_CLOCK.format(date)] if date else []),
            *_prompt_flags(items, checkpoints[0], names, rendered),
            *(_training_flags(checkpoints, request.chat_template_kwargs) if rendered else []),
        ],
        items=items,
        answer_formats=formats,
        thinking=Thinking.find(checkpoints[0].tokenizer.get_vocab(), (item.prompt_ids for item in items)),
    )
    _refuse_too_long(plan, checkpoints)
    return plan.changed(withheld=plan.digest()) if suite.private else plan


def open_plan(run: Run, data_dir: str | None = None, *, offline: bool = False) -> Plan:
    """Return the plan of a run, with the prompts of private suites loaded again.

    `data_dir`: the folder of their data, if not the plan's. With `offline` nothing is downloaded. Raise
    UserError if the data are not available or are not the planned prompts.
    """
    plan = run.plan.changed(request=run.plan.request.changed(offline=run.plan.request.offline or offline))
    request = plan.request.changed(data_dir=data_dir or plan.request.data_dir, allow_unsandboxed_code=False)
    return plan.changed(suites=[_with_private_prompts(suite, plan, request, run) for suite in plan.suites])


def prompt_texts(
    suite: Suite, spec: str, target: Inspected, request: RunRequest
) -> tuple[list[Prompt], bool | None, str | None]:
    """Return the suite's prompts as texts, whether the chat template wrote them, and the date that it read.

    None: the suite has plain texts; it read none. Without a template, a conversation becomes paragraphs. Raise
    UserError for an option that is no variable of one.
    """
    tokenizer, options = target.tokenizer, request.chat_template_kwargs
    rendered: bool | None = None
    clock = chat_template.Clock(request.chat_template_date)
    chat_template.refuse_reserved(tokenizer, options, "--chat-template-kwargs")

    def render(messages: Messages, /, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        nonlocal rendered
        rendered = bool(tokenizer.chat_template)  # an empty one would render nothing
        if not rendered:
            return "\n\n".join(chat_template.text_only(message)["content"] for message in messages)
        return chat_template.render(tokenizer, messages, answer_follows=True, tools=tools, options=options, clock=clock)

    with suite_errors(spec):
        prompts = suite.prompts(render, request.limit)
    whole = [prompt.follows is None or prompt.recorded for prompt in prompts]
    prompts = [replace(p, plain=not rendered and begins) for p, begins in zip(prompts, whole, strict=True)]
    return prompts, rendered, clock.time if clock.read else None


def _with_private_prompts(suite: SuitePlan, plan: Plan, request: RunRequest, run: Run) -> SuitePlan:
    """Return the suite's plan with the prompts that the stored plan withholds. Raise UserError if they changed."""
    if suite.withheld is None:
        return suite
    source = next(source for cell in plan.cells if cell.suite == suite.suite for source in cell.checkpoints.values())
    checkpoint = inspect(source, offline=request.offline, needs_mask=False)
    opened = open_suite(suite.suite, request)
    prompts, *_ = prompt_texts(opened, suite.suite, checkpoint, request)
    complete = suite.changed(items=_tokenise(prompts, suite.suite, checkpoint, request.protocol))
    if complete.digest() != suite.withheld:
        raise UserError(
            f"the prompts of suite {suite.suite!r} are not those planned in {str(run.directory.path)!r}; restore "
            "the data that it was planned with (`--data-dir`), or start another run with `mtbench run -o DIR`."
        )
    return complete


def _described(suite: Suite, request: RunRequest, rendered: bool | None, date: str | None) -> dict[str, Any]:
    """Return the suite's description of its task, with whether a chat template wrote its prompts, and what it read."""
    task = {name: bool(rendered) if name == "chat_template" else value for name, value in suite.task.items()}
    options = dict(request.chat_template_kwargs)
    task |= {"template_options": options} if options and rendered else {}
    return task | ({"template_date": date} if date else {})


def _prompt_flags(items: Sequence[Item], target: Inspected, names: list[str], rendered: bool | None) -> list[str]:
    """Return remarks on a missing chat template, on variables that it does not read, on end tokens and stop strings."""
    flags = [RAW_PROMPTS] if rendered is False else []
    names = chat_template.ignored(target.tokenizer, names) if rendered else names
    flags += [f"the chat template does not read {name}" for name in names]
    ended = sum(last in target.end_ids for item in items for last in item.prompt_ids[-1:])  # by `add_eos_token`
    flags += [f"{ended} of {len(items)} prompts end with an end token"] if ended else []
    ids, stops = target.tokenizer.get_vocab(), dict.fromkeys(s for item in items for s in (*item.stop, *item.cut))
    never = [s for s in stops if s in ids and (ids[s] >= target.vocabulary or ids[s] == target.mask_id)]
    return [*flags, *(f"the stop string {stop!r} is a token that no arm may emit" for stop in never)]


def _training_flags(checkpoints: Sequence[Inspected], options: chat_template.Options) -> list[str]:
    return [
        f"{short_name(one.source)} was trained with the template variables {joined(pairs(then)) or 'none'}, and runs "
        f"with {joined(pairs(options)) or 'none'}"
        for one in checkpoints
        if (then := one.chat_template_kwargs) is not None and then != options
    ]


def _refuse_unknown_ids(prompts: Sequence[Prompt], items: Sequence[Item], tokenizer: Any, reader: Inspected) -> None:
    """Raise UserError for the first prompt with a token id that no row of the reader's embedding has."""
    template = str(tokenizer.chat_template).replace("bos_token", str(tokenizer.bos_token))
    template = template.replace("eos_token", str(tokenizer.eos_token))
    for p, item in zip(prompts, items, strict=True):
        if (largest := max(item.prompt_ids, default=0)) >= reader.vocabulary:
            token = tokenizer.decode([largest])
            own = p.plain or token not in template
            by = "tokenizer" if token not in p.text else "prompt" if own else "chat template"
            raise UserError(
                f"{item.item} has the token id {largest}, {token!r:.40} of the {by}: the tokenizer has ids up to "
                f"{max(tokenizer.get_vocab().values())}, the embedding {reader.vocabulary} rows; resize that of "
                f"{reader.source!r} (transformers' `resize_token_embeddings`), or give another checkpoint by `--model`."
            )


def _refuse_other_tokens(first: Inspected, other: Inspected, prompt: Prompt, item: Item) -> None:
    """Raise UserError unless two checkpoints have the same token ids and tokenise `prompt` to the ids of `item`."""
    other_ids = other.tokenizer.get_vocab()
    for word, token_id in first.tokenizer.get_vocab().items():
        if other_ids.get(word, token_id) != token_id:
            raise UserError(
                f"checkpoints {first.source!r} and {other.source!r} have different token ids for {word!r}, so they "
                "would read different prompts; give checkpoints of one family with `--checkpoint`, or a method whose "
                "draft may have other ids (`vocabulary=intersection`)."
            )
    if _token_ids([prompt], other) != [item.prompt_ids]:
        raise UserError(
            f"checkpoints {first.source!r} and {other.source!r} tokenise {item.item} differently, so their token "
            "counts cannot be compared; give checkpoints of one family with `--checkpoint`."
        )


def _refuse_too_long(suite: SuitePlan, checkpoints: Sequence[Inspected]) -> None:
    """Raise UserError if the longest conversation with its answers exceeds a checkpoint's context."""
    positions, item = max(zip(suite.positions, suite.items, strict=True), key=lambda one: one[0])
    turns, turn = 1, item
    while turn.follows is not None and turn.shared is None:
        turns, turn = turns + 1, suite.items[turn.follows]
    prompt_tokens = positions - turns * suite.max_new_tokens
    for checkpoint in checkpoints:
        if positions > checkpoint.max_positions:
            largest = (checkpoint.max_positions - prompt_tokens) // turns
            lower = f"lower `--max-new-tokens` to {largest}, or " if largest > 0 else ""
            raise UserError(
                f"{item.item} has {prompt_tokens} prompt tokens, which with {turns} x {suite.max_new_tokens} new ones "
                f"do not fit the context of {checkpoint.source!r} ({checkpoint.max_positions}); {lower}shorten the "
                f"prompts of `--suite {suite.suite}`."
            )


def _tokenise(
    prompts: Sequence[Prompt], suite: str, checkpoint: Inspected, protocol: str, fits: tuple[int, int] | None = None
) -> list[Item]:
    """Return the prompts of a suite as tokenised items. Raise UserError if one follows none before it.

    `fits`: most positions of a prompt with its answer, and tokens of an answer. A turn that takes more is left out, as
    are those behind it, which are never tokenised. None: nothing is left out.
    """
    later: dict[str | None, list[Prompt]] = {None: []}
    for prompt in prompts:
        if prompt.follows not in later:
            raise UserError(f"suite {suite!r}: {prompt.item!r} follows {prompt.follows!r}, which does not exist.")
        later[prompt.follows].append(prompt)
        later[prompt.item] = []
    room, budget = fits or (1 << 62, 0)
    tokens: dict[str, tuple[list[int], int | None]] = {}  # by item: its ids, and those shared with the turn before
    ends: dict[str | None, tuple[int, list[int]]] = {None: (0, [])}  # turns before: positions, and ids of the prompt
    while turns := [prompt for before in ends for prompt in later[before]]:
        here: dict[str | None, tuple[int, list[int]]] = {}
        for prompt, ids in zip(turns, _token_ids(turns, checkpoint), strict=True):
            before, of_before = ends[prompt.follows]
            end = (0 if prompt.recorded else before) + len(ids) + budget
            if end <= room:
                shared = first_difference(of_before, ids) if prompt.recorded and prompt.follows is not None else None
                tokens[prompt.item] = ids[shared or 0 :], shared
                here[prompt.item] = end, ids
        ends = here
    kept = [prompt for prompt in prompts if prompt.item in tokens]
    index = {prompt.item: number for number, prompt in enumerate(kept)}
    formats, cut_when_scored = _answer_formats(kept), protocol == "paper"
    return [
        Item(
            item=prompt.item,
            prompt_ids=tokens[prompt.item][0],
            stop=[] if cut_when_scored else list(prompt.stop),
            cut=list(prompt.stop) if cut_when_scored else [],
            follows=None if prompt.follows is None else index[prompt.follows],
            shared=tokens[prompt.item][1],
            scored=prompt.scored,
            answer_format=None if prompt.answer_format is None else formats.index(prompt.answer_format),
            think_s=prompt.think_s,
        )
        for prompt in kept
    ]


def _answer_formats(prompts: Sequence[Prompt]) -> list[AnswerFormat]:
    formats: list[AnswerFormat] = []
    for prompt in prompts:
        if prompt.answer_format is not None and prompt.answer_format not in formats:
            formats.append(prompt.answer_format)
    return formats


def _token_ids(prompts: Sequence[Prompt], checkpoint: Inspected) -> list[list[int]]:
    """Return the token ids of each prompt. Raise UserError if a text has fewer tokens than `Prompt.tokens`."""
    texts = [prompt.text for prompt in prompts]
    token_ids = chat_template.tokenise(checkpoint.tokenizer, texts, plain=False)
    if any(prompt.plain for prompt in prompts):
        own = chat_template.tokenise(checkpoint.tokenizer, texts, plain=True)
        token_ids = [(own if prompt.plain else token_ids)[place] for place, prompt in enumerate(prompts)]
    for prompt, ids in zip(prompts, token_ids, strict=True):
        if prompt.tokens is not None and len(ids) < prompt.tokens:
            raise UserError(
                f"{prompt.item} needs {prompt.tokens} tokens, but the tokenizer of {checkpoint.source!r} makes only "
                f"{len(ids)} of its text; use another suite, such as `--suite prompts:FILE.jsonl`."
            )
    return [ids[: prompt.tokens] for prompt, ids in zip(prompts, token_ids, strict=True)]
