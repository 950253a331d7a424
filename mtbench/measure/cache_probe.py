"""Probes of a prefix cache: does an answer change where leading tokens of its prompt are cached?

Let A be a prompt, and B one of another conversation. The arm's own server gets greedy requests, one at a time: A
without the cache; in one cache A, B, A; A+, which is A, its answer and B; and A again. So A+ reads keys of an answer
and of rejected drafts. In a server with one slot, A+ and the last A are warm. Known faults: vLLM issues 43559, 54893.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

from mtbench.decoding.output import Generation, first_difference
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.measure.lossless_check import Rescoring
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import CacheCheck, CacheRecord
from mtbench.plan.plan import Cell, Plan, SuitePlan
from mtbench.records import dump
from mtbench.statistics import EPSILON_CAP, EXACT_EPSILON

PROBES = 8  # conversations
PROBING_S = 60.0  # in which the probes of a cell begin: each reads long prompts five times or more
TOKENS = 32  # most of an answer
FILE = "prefix_cache/{}.json"  # of a cell
UNPROBED = CacheRecord(checks=[])
Ask = Callable[[Request], Generation]


def read(directory: RunDirectory, cell: str) -> CacheRecord:
    """Return the probes of a cell: none if they were not made."""
    name = FILE.format(cell)
    return directory.read(name, CacheRecord) if directory.has(name) else UNPROBED


def probe(plan: Plan, cell: Cell, answered: Mapping[str, Sequence[int]], ask: Ask) -> CacheRecord:
    """Probe a cell's server on the last turns of conversations spread over the suite. `answered`: as in a run."""
    suite, items = plan.suite(cell.suite), sorted(item for block in plan.group(cell.cell).blocks for item in block)
    last = [*{suite.first_turn(item): item for item in items}.items()]
    n, checks, began_at = min(PROBES, len(last)), list[CacheCheck](), time.monotonic()
    chosen = [last[k * len(last) // n] for k in range(n)]
    try:
        for k, (first, item) in enumerate(chosen):
            if time.monotonic() - began_at > PROBING_S:
                break
            turn = [suite.first_turn(number) for number in items].count(first)
            prompt, other = (suite.prompt(number, answered) for number in (item, chosen[k - 1][0]))
            checks += _checks(suite, suite.items[item].item, turn, prompt, other, ask)
    except (UserError, RuntimeError, TimeoutError) as error:  # RuntimeError: the worker died
        return CacheRecord(checks=[], why=f"{error}".rstrip("."))
    return CacheRecord(checks=checks)


def _checks(suite: SuitePlan, item: str, turn: int, prompt: list[int], other: list[int], ask: Ask) -> list[CacheCheck]:
    """Send the requests of one probe. `other`: a prompt of another conversation, if there is one."""
    n, warm = max(1, min(TOKENS, suite.max_new_tokens // 2)), uuid4().hex

    def asked(ids: list[int], cache: str | None = None, *, begins: bool = True) -> Generation:
        own = cache or uuid4().hex
        return ask(Request(prompt_ids=ids, max_new_tokens=n, temperature=0.0, cache=own, begins=begins))

    def check(ids: list[int], known: int, cold: list[Generation]) -> CacheCheck:
        answers = [asked(ids, warm, begins=False), *(cold or [asked(ids), asked(ids)])]
        tokens, cached = [a.token_ids for a in answers], [a.cached_tokens for a in answers]
        known = min(known, len(ids) - 1)  # the last token is always read
        return CacheCheck(item=item, turn=turn, prompt_ids=ids, known=known, answers=tokens, cached=cached)

    cold = [asked(prompt), asked(prompt, warm)]
    asked(other, warm)
    again = check(prompt, len(prompt), cold)
    read = [*prompt, *again.answers[0]]
    longer = check([*read, *other][: suite.room - n], len(read), [])  # the server has room for it
    return [again, longer, check(prompt, len(prompt), cold)]


def judge(rescoring: Rescoring, cell: Cell) -> None:
    """Let the judge hold apart the tokens of answers that differ. ε is 0 if none can: exact arithmetic has no other."""
    files, source, dtype = rescoring.run.directory, cell.checkpoints[cell.on], rescoring.pool.dtype
    record = read(files, cell.cell)
    if record.epsilon is not None or not any(check.differs for check in record.checks):
        return

    def apart(check: CacheCheck, a: Sequence[int], b: Sequence[int]) -> float | None:
        if (at := first_difference(a, b)) == min(len(a), len(b)):
            return None
        [logits] = model.logits([[*check.prompt_ids, *a[: at + 1]]], [1])
        return abs(float(logits[0, a[at]] - logits[0, b[at]]))

    try:
        model, epsilon = rescoring.whole(source, dtype), rescoring.rescored(cell, []).epsilon
        noise = [apart(check, *check.answers[1:]) or 0.0 for check in record.checks]
        checks = [c.changed(apart=apart(c, *c.answers[:2]) if c.differs else None) for c in record.checks]
        epsilon = EPSILON_CAP if epsilon is None else min(EPSILON_CAP, max(epsilon, *noise))
        record = CacheRecord(checks=checks, epsilon=epsilon)
    except Exception as error:  # any fault of the model's code or files; it costs the judgement, not the run
        exact = dtype in EXACT_EPSILON and SERVING_ENGINES[str(cell.engine)]().other_weights(source) is None
        exact &= not (isinstance(error, TimeoutError) or any(check.is_noisy for check in record.checks))
        record = record.changed(epsilon=0.0 if exact else None, why=f"{error}".rstrip("."))
    files.write_json(FILE.format(cell.cell), dump(record))


def faults(record: CacheRecord) -> list[str]:
    """Return an answer that a cache changes by more than arithmetic, and a count that cannot be, if there are any."""
    e, checks = record.epsilon, record.checks
    changed = [c for c in checks if c.differs and e is not None and (c.apart is None or c.apart > e)]
    wrong = [(c, n, most) for c in checks for n, most in zip(c.cached, (c.known, 0, 0), strict=True) if (n or 0) > most]
    return [f"its prefix cache changes answers: turn {check.turn}: {_difference(check)}" for check in changed[:1]] + [
        f"its counts of cached tokens cannot be: turn {c.turn}: {n:,} of {len(c.prompt_ids):,}, at most {most:,} can be"
        for c, n, most in wrong[:1]
    ]


def _difference(check: CacheCheck) -> str:
    (warm, cold, _), cached = check.answers, check.cached[0]
    at, length = first_difference(warm, cold), f"up to {check.known:,}" if cached is None else f"{cached:,}"
    tokens = " → ".join(f"{ids[at]:,}" if at < len(ids) else "the end" for ids in (cold, warm))
    apart = "" if check.apart is None else f", {check.apart:.2g} logits apart"
    differs = f"with {length} cached tokens the answer differs from token {at + 1} on ({tokens}{apart})"
    return f"{differs}; without the cache it is {'not ' * check.is_noisy}the same twice"
