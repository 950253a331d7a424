"""After a server's warm-up no request waits for a capture. Recordings stand in for CUDA graphs."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from decoding_cases import READ_LAG, ar, mars, on, requests_for
from decoding_live import Watcher, generation_of
from live_server import serving, small_served
from recorded_graphs import prefills
from small import small_checkpoint

from mtbench.decoding.batch_clock import Clock
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.live import LiveRun, Queue, Ticket
from mtbench.decoding.loop import decode
from mtbench.decoding.method import Method
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling

PROMPTS = [[(7 * i + j) % 30 for j in range(1 + 9 * i)] for i in range(6)]
DRAWN = [
    Sampling(),
    Sampling(1.3),
    Sampling(top_k=3),
    Sampling(0.7, top_p=0.8),
    Sampling(1.0, top_k=4, min_p=0.1),
    Sampling(),
]


@pytest.mark.parametrize(
    ("method", "widths"), [(ar(), 1), (mars(tau=0.3, block_size="auto"), 3)], ids=["ar", "mars of several widths"]
)
def test_no_request_captures_a_step(method: Method, widths: int, runner: ModelRunner, recorded: list[str]) -> None:
    """Greedy, sampled, filtered, and all in one batch, in every width. Their tokens are those of a run."""
    with torch.inference_mode():
        batch = Captured(method, on(ENGINES["graph"]().runner(runner.checkpoint)), 3, 96)
    with serving(replace(small_served(method, runner, rows=3), make=lambda: batch)) as running:
        before = len(recorded)
        assert before == 1 + prefills(batch) + 3 * widths  # the first one keeps the pool

        def ask(number: int, drawn: Sampling) -> list[int]:
            body = {"prompt": PROMPTS[number], "max_tokens": 20, **asdict(drawn), "seed": number}
            [choice] = running.complete(**body, return_token_ids=True)["choices"]
            ids: list[int] = choice["token_ids"]
            return ids

        asked = list(enumerate(DRAWN))
        alone = [ask(*asked[1]), ask(*asked[0])]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda one: ask(*one), asked))
        assert len(recorded) == before
    requests = requests_for(PROMPTS, 20, seeds=range(len(PROMPTS)))
    requests = [replace(r, **asdict(drawn)) for r, drawn in zip(requests, DRAWN, strict=True)]
    want = [g.token_ids for g in decode(method, on(runner), requests, rows=3, make=READ_LAG)[0]]
    assert together == want
    assert alone == [want[1], want[0]]


def test_no_prompt_captures_a_step(recorded: list[str]) -> None:
    """Of whatever length, alone and beside others, greedy, sampled and filtered. Prefills are warmed up, too."""
    checkpoint = small_checkpoint()
    with torch.inference_mode():
        batch = Captured(ar(), on(ENGINES["graph"]().runner(checkpoint)), 4, 240)
        queue = Queue()
        run = LiveRun(batch, queue, Watcher())
        batch.open(run)
        before = len(recorded)
        lengths = [1, 2, 3, 40, 66, 130, 200]
        prompts = [*([5] * length for length in lengths), *([6] * length for length, _ in product(lengths, range(4)))]
        asked = [replace(r, temperature=float(i % 3), top_k=i % 2) for i, r in enumerate(requests_for(prompts, 2))]
        tickets = [Ticket(request) for request in asked]
        for ticket in tickets:
            queue.put(ticket)
        queue.close()
        batch.decode(run, Clock())
    assert len(recorded) == before
    want, _ = decode(ar(), on(ModelRunner(checkpoint)), [ticket.request for ticket in tickets])
    assert [generation_of(ticket).token_ids for ticket in tickets] == [answer.token_ids for answer in want]
