"""Plan a load: prompts, arms, and points in rounds.

A single prompt is a conversation of one turn. The conversations have one seeded order. In round r a point of N sends
the r-th N of it, so all arms get the same requests at a level, and one comes again only when all have been sent. Every
round runs every arm once, in a seeded order; during its turn an arm's levels come in a seeded order, too.
"""

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mtbench.clients.openai_client import ServerError
from mtbench.clients.openai_wire import drawn, text_for
from mtbench.decoding.arms import ENGINES, Arm, is_served, parse_arms, safe
from mtbench.decoding.registry import METHODS, SERVING_ENGINES, plain_decoding
from mtbench.errors import UserError
from mtbench.evaluation.suite import Prompt, Suite
from mtbench.experiments.load.format import SCHEMA_VERSION, ArmPlan, LoadItem, LoadPlan, LoadRequest, PointPlan
from mtbench.lineup.lineup import Lineup, family_of
from mtbench.lineup.model_sampling import with_sampling
from mtbench.lineup.planner import make_plan
from mtbench.models.loading import Inspected
from mtbench.options.engine_options import EngineOption, with_options
from mtbench.plan.plan import RunRequest, SuitePlan
from mtbench.plan.prompts import open_suites, prompt_texts

NO_SPECIAL = "requests have add_special_tokens=false: a server that ignores it, as SGLang's, reads more tokens"


def plan(request: LoadRequest) -> LoadPlan:
    """Return the plan of a load. Raises UserError for anything that is known to fail."""
    # With URLs only, plain decoding is not served: its checkpoint has the tokenizer and the template.
    arms = _served_arms(request.method or plain_decoding()[:1], request.engine, run_request(request).settings)
    chosen = [
        ArmPlan(
            name=_name(arm),
            method=f"{arm.method}:{','.join([*_changed(arm), f'on={arm.on}', f'engine={arm.engine}'])}",
            engine=arm.engine if is_served(arm.engine) else None,
            engine_options=[*arm.settings],
        )
        for arm in (arms if request.method or any(map(is_served, request.engine)) else ())
    ]
    chosen += [
        ArmPlan(name=name, method=None, url=url, key_env=request.key_env.get(name)) for name, url in request.url.items()
    ]
    if not chosen:
        raise UserError(
            "no arm is given; add `--method METHOD`, such as `--method mars:tau=0.95`, `--server ENGINE` or "
            "`--url NAME=URL`."
        )
    _refuse_prefix_cache(request, chosen)
    _refuse_same_names([arm.name for arm in chosen])
    _refuse_levels(request)
    needed = request.rounds * max(started_at(request, level) for level in request.levels)
    limited = run_request(request, min(needed, request.limit or needed))
    asked = with_sampling(limited, request.method or plain_decoding()[:1])
    opened = open_suites(asked)
    lineup = Lineup(family_of(asked, request.suite), asked, arms)
    planned = make_plan(asked, opened, lineup, here=any(arm.url is None for arm in chosen))
    suite, [suite_plan], checkpoint = opened[request.suite], planned.suites, lineup.checkpoints[0]
    _refuse_suite(suite, suite_plan)
    prompts, *_ = prompt_texts(suite, request.suite, checkpoint, planned.request)
    texts, fields = _sent(suite_plan, prompts, checkpoint)
    stops = {tuple(item.stop) for item in suite_plan.items}
    numbers = sorted(range(len(suite_plan.items)), key=suite_plan.first_turn)
    conversations = [[*found] for _, found in itertools.groupby(numbers, suite_plan.first_turn)]
    return LoadPlan(
        schema_version=SCHEMA_VERSION,
        request=request.changed(
            chat_template_date=planned.request.chat_template_date,
            dtype=planned.request.dtype,
            **planned.request.of_sampling,
        ),
        family=suite_plan.family,
        tokenizer=checkpoint.source,
        task=suite_plan.task,
        metric=suite_plan.metric,
        max_new_tokens=suite_plan.max_new_tokens,
        room=suite_plan.room,
        stop=list(next(iter(stops))) if len(stops) == 1 else [],
        arms=chosen,
        items=_items(suite_plan, texts, conversations),
        fields=fields,
        flags=[*suite_plan.flags, *checkpoint.flags, *([NO_SPECIAL] if fields else [])],
        points=_points(request, chosen, conversations),
        unit="request" if len(conversations) == len(suite_plan.items) else "conversation",
        plugins=planned.plugins,
    )


def _refuse_same_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms have the name {name!r}; give each arm once.")


def _items(planned: SuitePlan, texts: Sequence[str], conversations: Sequence[list[int]]) -> list[LoadItem]:
    turns = sorted((number, turn) for one in conversations for turn, number in enumerate(one, start=1))
    sizes = [len(planned.prompt(number)) for number, _ in turns]
    return [
        LoadItem(item=i.item, prompt=text, prompt_tokens=n, cut=i.stop, scored=i.scored, turn=turn, think_s=i.think_s)
        for i, text, n, (_, turn) in zip(planned.items, texts, sizes, turns, strict=True)
    ]


def _sent(planned: SuitePlan, prompts: Sequence[Prompt], checkpoint: Inspected) -> tuple[list[str], dict[str, bool]]:
    """Return the text of each item of which a server makes its tokens, and the fields of requests that it needs."""
    text_of = {prompt.item: prompt.text for prompt in prompts}  # also of turns that the plan leaves out
    texts = [(planned.prompt(number), checkpoint, [text_of[i.item]]) for number, i in enumerate(planned.items)]
    for fields in ({}, {"add_special_tokens": False}):
        with suppress(ServerError):
            return [text_for(*each, special=not fields) for each in texts], fields
    raise UserError(f"suite {planned.suite!r}: no texts have the tokens of its prompts, and a load sends texts.")


def _served_arms(specs: Sequence[str], engines: Sequence[str], engine_options: Sequence[EngineOption]) -> list[Arm]:
    arms = parse_arms(specs, engines, engine_options)
    for arm in arms:
        if is_served(arm.engine) and not SERVING_ENGINES[arm.engine].text:
            raise UserError(
                f"{str(arm)!r}: the server of {SERVING_ENGINES[arm.engine].title} takes token ids only, and the client "
                "of a load sends text; give another --server. See `mtbench ls engines`."
            )
        if METHODS[arm.method].outside:
            raise UserError(
                f"{arm.method} is an external engine and cannot be served; start its server and give it with "
                "`--url NAME=URL`."
            )
    return arms


def _changed(arm: Arm) -> list[str]:
    return [f"{name}={value}" for name, value in arm.changed]


def _name(arm: Arm) -> str:
    options = _changed(arm)
    if arm.on != METHODS[arm.method].roles[0]:
        options.append(f"on={arm.on}")
    if arm.engine != ENGINES[0]:
        options.append(f"engine={with_options(arm.engine, arm.settings)}")
    return f"{arm.method}{':' if options else ''}{','.join(options)}"


def sampling_fields(request: LoadRequest, seed: int) -> dict[str, Any]:
    """Return the fields of a request that say how its tokens are drawn: all, since servers have defaults of their own.

    A greedy one needs the temperature only.
    """
    penalties = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return {**drawn(request.sampling), **penalties, "seed": seed} if request.temperature else {"temperature": 0}


def started_at(request: LoadRequest, level: float) -> int:
    """Return how many conversations a point starts: as given, or as many as a rate starts in the duration."""
    return request.requests or max(1, round(level * request.duration_s))


def run_request(request: LoadRequest, limit: int | None = None) -> RunRequest:
    """Return the options of a run on the same suite, to plan its prompts and to score with it."""
    shared = LoadRequest.model_fields.keys() & RunRequest.model_fields.keys() - {"method", "engine"}
    same: dict[str, Any] = {name: getattr(request, name) for name in shared & request.model_fields_set}
    return RunRequest(**same | {"suite": [request.suite], "batch_size": [1], "rounds": 1, "limit": limit})


def _refuse_levels(request: LoadRequest) -> None:
    if bool(request.request_rate) == bool(request.concurrency):
        raise UserError("give the load as either --request-rate 1,2,4 (requests per second) or --concurrency 1,4,16.")
    for name, given in (("--request-rate", request.request_rate), ("--concurrency", request.concurrency)):
        for level in given:
            if given.count(level) > 1:
                raise UserError(f"{name} has {level:g} twice; give each level once.")
    if request.concurrency and request.poisson:
        raise UserError(
            "--poisson belongs to --request-rate: with --concurrency the next request starts when one has ended."
        )
    if request.concurrency and request.requests is None:
        raise UserError("--concurrency needs --requests N: how many requests a point sends.")


def _refuse_suite(suite: Suite, planned: SuitePlan) -> None:
    if suite.private:
        raise UserError(
            f"suite {planned.suite!r} is private: its prompts may not be stored, and a load stores them for its "
            "client; use another suite."
        )
    if not all(map(planned.is_fixed, range(len(planned.items)))):
        raise UserError(
            f"suite {planned.suite!r} has turns that follow an arm's own answers, and all arms of a load get the same "
            "prompts; give recorded conversations: `--suite conversations:FILE`."
        )


def _refuse_prefix_cache(request: LoadRequest, chosen: Sequence[ArmPlan]) -> None:
    if "on" in request.prefix_cache and None in ([arm.engine for arm in chosen if arm.url is None] or [None]):
        caching = ", ".join(name for name in SERVING_ENGINES if SERVING_ENGINES[name].caches)
        raise UserError(
            "--prefix-cache on is for engines that this command starts: mtbench's own server has no such cache, and a "
            f"URL keeps its settings; give `--server` one of {caching}, or leave it out."
        )


def _points(request: LoadRequest, chosen: Sequence[ArmPlan], order: list[list[int]]) -> list[PointPlan]:
    """Return the points in the order in which they are run. `order`: the items of each conversation; it is shuffled."""
    random.Random(f"{request.seed}/items").shuffle(order)
    points = []
    for number in range(1, request.rounds + 1):
        rng = random.Random(f"{request.seed}/round {number}")
        for arm in rng.sample(list(chosen), len(chosen)):
            for level in rng.sample(request.levels, len(request.levels)):
                size = started_at(request, level)
                started = (order[place % len(order)] for place in range((number - 1) * size, number * size))
                points.append(
                    PointPlan(
                        point=f"{number:02}.{safe(arm.name)}.{level:g}",
                        round=number,
                        arm=arm.name,
                        level=level,
                        seed=random.Random(f"{request.seed}/{number}/{level:g}").randrange(1 << 31),
                        items=[item for conversation in started for item in conversation],
                    )
                )
    return points
