"""References that recompute everything: no cache, no window, no loop of the project, one row at a time.

They are written from the papers, to be held against `mtbench.decoding.loop`. Each returns tokens and commits.
"""

import heapq
from collections.abc import Callable, Container, Sequence

import numpy as np
from torch import Tensor

Path = tuple[int, ...]  # tokens
Logits = Callable[[list[int]], Tensor]  # ids (L,) -> logits (L, V), −∞ where no arm may emit


def sure(logits: Tensor, metric: str, tau: float) -> bool:
    """One position's confidence test, in float32."""
    p = logits.float().softmax(0)
    if metric == "probability":
        return bool(p.max() >= tau)
    if metric == "margin":
        top = p.sort(descending=True).values
        return bool(top[0] - top[1] >= tau)
    return -sum(float(x) * float(x.log()) for x in p if x > 0) <= tau


def finish(answer: list[int], commits: list[int], new: list[int], end: int, budget: int) -> bool:
    """Append `new` up to end token and budget; True if the answer is finished."""
    new = new[: budget - len(answer)]
    if end in new:
        new = new[: new.index(end) + 1]
    answer += new
    commits.append(len(new))
    return answer[-1:] == [end] or len(answer) == budget


def autoregressive(logits: Logits, prompt: list[int], budget: int, end: int) -> tuple[list[int], list[int]]:
    answer: list[int] = []
    commits: list[int] = []
    while not finish(answer, commits, [int(logits(prompt + answer)[-1].argmax())], end, budget):
        pass
    return answer, commits


def speculative(
    target: Logits,
    draft: Callable[[list[int], int], Tensor],
    prompt: list[int],
    *,
    ahead: int,
    each: int,
    budget: int,
    end: int,
) -> tuple[list[int], list[int]]:
    """Return tokens and commits of `ahead` drafts a step, `each` a forward.

    `draft(text, masks)`: its logits (masks + 1, V) after a text and so many masks.
    """
    answer: list[int] = []
    commits: list[int] = []
    while True:
        text = prompt + answer
        drafts: list[int] = []
        while len(drafts) < ahead:
            drafts += draft(text + drafts, min(each, ahead - len(drafts)) - 1).argmax(1).tolist()
        own = target(text + drafts)[-ahead - 1 :].argmax(1).tolist()
        kept = next((i for i in range(ahead) if drafts[i] != own[i]), ahead)
        if finish(answer, commits, own[: kept + 1], end, budget):
            return answer, commits


def likeliest_prefixes(log_p: Callable[[Path], Sequence[float]], depth: int, nodes: int) -> list[Path]:
    """Return the likeliest prefixes of at most `depth` tokens, the likeliest first, by a heap (arXiv 2604.12989).

    `log_p`: of each token after a prefix.
    """
    heap: list[tuple[float, Path]] = [(0.0, ())]
    found: list[Path] = []
    while heap and len(found) <= nodes:
        cost, path = heapq.heappop(heap)
        found.append(path)
        for token, each in enumerate(log_p(path) if len(path) < depth else ()):
            if each > -float("inf"):
                heapq.heappush(heap, (cost - each, (*path, token)))
    return found[1:]


def tree_speculative(
    target: Logits, guessed: Callable[[list[int]], Container[Path]], prompt: list[int], budget: int, end: int
) -> tuple[list[int], list[int]]:
    """Return tokens and commits: greedy tokens while they are one of the paths that are guessed after a text."""
    answer, commits = list[int](), list[int]()
    while True:
        text, new = prompt + answer, list[int]()
        paths = guessed(text)
        while not new or tuple(new) in paths:
            new.append(int(target(text + new)[-1].argmax()))
        if finish(answer, commits, new, end, budget):
            return answer, commits


def accepted(judged: Tensor, metric: str, tau: float) -> list[int]:
    """The first prediction, and those behind it while the model is sure; `judged` (N, V)."""
    new = [int(judged[0].argmax())]
    for column in judged[1:]:
        if tau == 1 or not sure(column, metric, tau):
            break
        new.append(int(column.argmax()))
    return new


def mars(
    logits: Logits, prompt: list[int], budget: int, end: int, *, mask: int, size: int, tau: float, metric: str
) -> tuple[list[int], list[int]]:
    """MARS with a window of `size` predictions, everything recomputed in every forward."""
    answer: list[int] = []
    commits: list[int] = []
    while True:
        judged = logits(prompt + answer + [mask] * (size - 1))[-size:]
        if finish(answer, commits, accepted(judged, metric, tau), end, budget):
            return answer, commits


def mars_block(
    logits: Logits, prompts: Sequence[list[int]], budget: int, end: int, *, mask: int, block: int, tau: float
) -> tuple[list[list[int]], list[list[int]]]:
    """The paper's block cache on a batch: windows end with the block, full rows wait, then one fill forward."""
    answers: list[list[int]] = [[] for _ in prompts]
    commits: list[list[int]] = [[] for _ in prompts]
    live = set(range(len(prompts)))
    begin = 0
    while live:
        if all(len(answers[r]) == begin + block for r in live):  # the fill: one forward that commits nothing
            begin += block
            for r in live:
                commits[r].append(0)
            continue
        for r in sorted(live):
            left = begin + block - len(answers[r])
            if left == 0:
                commits[r].append(0)
                continue
            judged = logits(prompts[r] + answers[r] + [mask] * (left - 1))[-left:]
            if finish(answers[r], commits[r], accepted(judged, "probability", tau), end, budget):
                live.discard(r)
    return answers, commits


def block_diffusion(
    logits: Logits, prompt: list[int], budget: int, end: int, *, mask: int, block: int, least: int, tau: float
) -> tuple[list[int], list[int]]:
    """Shifted block diffusion, up to the current block's end recomputed in every forward; `logits` sees by blocks."""
    text: dict[int, int] = dict(enumerate(prompt))  # position -> token
    answer: list[int] = []
    commits: list[int] = []
    while True:
        known = len(prompt) + len(answer)
        begin = known - known % block
        judged = logits([text.get(place, mask) for place in range(begin + block)])
        chance = {p: float(judged[p - 1].float().softmax(0).max()) for p in range(begin, begin + block)}
        waiting = sorted((p for p in chance if p not in text), key=lambda p: -chance[p])
        for rank, place in enumerate(waiting):
            if rank < least or (tau < 1 and chance[place] >= tau):
                text[place] = int(judged[place - 1].argmax())
        new: list[int] = []
        while known + len(new) in text:
            new.append(text[known + len(new)])
        if finish(answer, commits, new, end, budget):
            return answer, commits


def fast_dllm_v2(
    logits: Callable[..., Tensor],
    prompt: list[int],
    budget: int,
    end: int,
    *,
    mask: int,
    block: int,
    sub: int,
    tau: float,
    dual: bool,
) -> tuple[list[int], list[int]]:
    """Fast-dLLM v2 for one prompt. `logits(ids)` (L, V) sees by blocks.

    `logits(ids, again, at)`: of the tokens `again` at position `at` and after, beside keys and values made from `ids`.
    """
    text: dict[int, int] = dict(enumerate(prompt))  # position -> token
    answer: list[int] = []
    commits: list[int] = []
    before: list[int] | None = None  # what the block held when it was last fed
    while True:
        known = len(prompt) + len(answer)
        start, stop = known - known % sub, known - known % block + block
        if known % block == 0:  # the block before, finished, is fed; its last position predicts this one
            text[known] = int(logits([text[place] for place in range(known)])[-1].argmax())
            before = None
        else:
            now = [text.get(place, mask) for place in range(stop)]
            if dual and before is not None and start in text:
                judged = dict(enumerate(logits(before, now[start : start + sub], start), start + 1))
            else:
                before = now
                judged = dict(enumerate(logits(now), 1))
            waiting = [place for place in range(start, start + sub) if place not in text]
            chance = {place: float(judged[place].float().softmax(0).max()) for place in waiting}
            best = max(waiting, key=lambda place: chance[place])
            for place in waiting:
                if place == best or (tau < 1 and chance[place] > tau):
                    text[place] = int(judged[place].argmax())
        new: list[int] = []
        while known + len(new) in text:
            new.append(text[known + len(new)])
        if finish(answer, commits, new, end, budget):
            return answer, commits


def block_verification(
    drafts: Sequence[int],
    small: Sequence[Sequence[float]],
    big: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> tuple[int, list[float]]:
    """Algorithm 2 of arXiv 2403.10444, line by line: accepted drafts, and the distribution of the token after them.

    `small[i]` and `big[i]`: distributions of draft model and target behind the first i drafts; `big` has one more.
    """
    accepted, prefix = 0, [1.0]
    for i, token in enumerate(drafts, start=1):
        prefix.append(min(prefix[-1] * big[i - 1][token] / small[i - 1][token], 1.0))
        passes = prefix[i]
        if i < len(drafts):
            mass = sum(max(prefix[i] * b - s, 0.0) for b, s in zip(big[i], small[i], strict=True))
            rest = mass + 1 - prefix[i]
            passes = mass / rest if rest else 1.0
        if uniforms[i - 1] <= passes:
            accepted = i
    if accepted == len(drafts):
        return accepted, list(big[accepted])
    left = [max(prefix[accepted] * b - s, 0.0) for b, s in zip(big[accepted], small[accepted], strict=True)]
    return accepted, [weight / sum(left) for weight in left]


def first_seen(tokens: list[int]) -> tuple[int, int]:
    """Return the most frequent token, of equal counts the first one seen, and its count."""
    token = max(dict.fromkeys(tokens), key=tokens.count)
    return token, tokens.count(token)


def suffix_draft(
    text: list[int],
    depth: int,
    factor: float,
    least: float,
    ahead: int,
) -> list[int]:
    """Return suffix decoding's chain with the largest score over suffixes of 1 to depth - 1 tokens, in float32."""
    best, drafts = np.float32(0), list[int]()
    for p in range(1, min(depth, len(text))):
        ends = [i for i in range(p, len(text) + 1) if text[i - p : i] == text[-p:]]  # behind each place of the suffix
        chain, chance, score = list[int](), np.float32(1), np.float32(0)
        while len(chain) < min(ahead, depth - p, int(np.float32(factor) * np.float32(p) + 1e-6)):
            following = [text[i] for i in ends if i < len(text)]
            if not following:
                break
            token, count = first_seen(following)
            chance *= np.float32(count) / np.float32(len(ends))
            if chance < np.float32(least):
                break
            ends = [i + 1 for i in ends if i < len(text) and text[i] == token]
            chain, score = [*chain, token], score + chance
        if score >= best:
            best, drafts = score, chain
    return drafts
