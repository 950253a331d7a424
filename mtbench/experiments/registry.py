"""The experiments by the name of their command. Light: an experiment imports torch, its options do not."""

import importlib
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """Where an experiment is: its options as MODULE:REQUEST,SESSION, itself as MODULE:NAME; and its help."""

    options: str
    experiment: str
    help: str


KINDS = {
    "run": Kind(
        "mtbench.plan.request:RunRequest,RunSession",
        "mtbench.experiments.run:EXPERIMENT",
        "Compare arms: plan, generate, score and report.",
    ),
    "choose": Kind(
        "mtbench.experiments.choose.request:RaceRequest,RaceSession",
        "mtbench.experiments.choose.experiment:EXPERIMENT",
        """Say which method to use, by a race of the methods that your checkpoints serve.

    An arm leaves as soon as it is surely not the one to choose.

    All methods that the checkpoints serve run beside plain decoding on your prompts. The decision names the fastest arm
    with the same tokens, and the fastest arm that loses no more than --max-loss, at every batch size.
    """,
    ),
    "gate": Kind(
        "mtbench.experiments.gate.request:GateOptions,GateSession",
        "mtbench.experiments.gate.experiment:EXPERIMENT",
        """Compare two builds of mtbench: their tokens, forward passes and speed.

    Each build decodes the same plan in processes of its own. Tokens and counts are compared first and must be equal.
    Then times are compared over pairs of processes, until the answer is known. The exit code is 0 for PASS, 1 for FAIL,
    2 for builds that cannot be compared, 3 for INCONCLUSIVE.

    A gate of a build with itself measures the noise of this machine: floor.json, beside the folder, gets it and the
    smallest slowdown that a gate with these options can find. It holds for this machine, torch and plan for 30 days.

    Without --method every method runs, which takes long on a CPU. A small start: --method ar --method mars:tau=0.9
    --batch-size 8 --limit 32 --blocks 4.
    """,
    ),
    "load": Kind(
        "mtbench.experiments.load.request:LoadRequest,LoadSession",
        "mtbench.experiments.load.experiment:EXPERIMENT",
        """Load servers with a suite's prompts: goodput, latency and accuracy from the same requests.

    Each arm is a server: `mtbench serve` with a method, started by this command, or a given URL. aiperf sends
    the prompts at every rate, arm by arm, in rounds. The answers are scored by the suite. A small start:
    --method ar --method mars:tau=0.95 --request-rate 2,8 --duration 10s --rounds 1.
    """,
    ),
    "audit": Kind(
        "mtbench.experiments.audit.request:AuditRequest,Session",
        "mtbench.experiments.audit.experiment:EXPERIMENT",
        """Say why the answers of B differ from those of A.

    The reference model scores both from the first difference on. A difference is a near-tie; or stored data prove its
    cause: prompt, end, temperature, checkpoint, draft or score; or it is beyond rounding, not explained. The exit code
    is 0 if every difference is explained and none is a fault, 1 if not, 2 for answers that cannot be compared.
    """,
    ),
    "reproduce": Kind(
        "mtbench.plan.request:ReproduceRequest,RunSession",
        "mtbench.experiments.reproduce:EXPERIMENT",
        """Run a published table and compare every figure with ours.

    It is a run: `mtbench run -o DIR --resume` continues it. An option that is not given has the table's value.
    """,
    ),
}


def records_of(name: str) -> tuple[Any, Any]:
    """Return the records of an experiment's request and session."""
    request, session = _named(KINDS[name].options)
    return request, session


def experiment_of(name: str) -> Any:
    """Return an experiment."""
    [experiment] = _named(KINDS[name].experiment)
    return experiment


def _named(place: str) -> tuple[Any, ...]:
    """Return the objects of MODULE:NAME,NAME."""
    module, _, names = place.partition(":")
    return tuple(getattr(importlib.import_module(module), name) for name in names.split(","))
