"""The interface of a serving engine: its methods, the start of its server, its requests.

An engine is one file in engines/, or a module of an installed package (entry points `mtbench.engines`). It serves one
arm by one server. mtbench sends prompts as token ids, and gets token ids back, so templates and tokenizers cannot
differ. Values that an engine does not report are null.
"""

import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mtbench.clients.engine_installation import EngineInstallation
from mtbench.clients.openai_client import Server
from mtbench.clients.openai_data import Reply
from mtbench.clients.openai_wire import body_of
from mtbench.decoding.method import Method
from mtbench.decoding.request import Request
from mtbench.errors import MissingWeights, UserError
from mtbench.files import cache_home, write_text
from mtbench.models import families, gguf, gguf_writer
from mtbench.models.checkpoint_files import CONFIG, Layout, check_files, linked_with, stored_bytes
from mtbench.models.configuration import downloaded
from mtbench.models.drafts.loading import known_draft
from mtbench.options import AUTO
from mtbench.options.engine_options import PREFIX_CACHE, ServerOption
from mtbench.sampling import FILTERS, GREEDY, Sampling

GGUF = ".gguf"
HOST, PORT = "127.0.0.1", 8000  # the port: in a command that is shown

# Differences of engines, and reasons why one has no setting for a method with some options.
SAMPLED = "Above a temperature of 0 it verifies drafts by another rule."
ALWAYS_WIDE = "Where nothing matches, it feeds one position, and mtbench the whole window."
NOT_ALWAYS = "It drafts only where the text repeats, so its acceptance cannot be made up."
NO_TREE = "It drafts a chain: give tree=1."
NO_PARALLEL = "It has no P-EAGLE: give a draft that drafts token by token."
NO_SUCH_DRAFT = "Domino and JetSpec drafts have no setting of it here: give a DFlash or DSpark draft."
NO_CONFIDENCE = "It verifies whole drafts: give confidence=0."
NO_BLOCK = "It has no block verification: give verify=rejection."
NO_REJECTION = "It has no rejection sampling by the draft's probabilities: give verify=match."
NO_FILTERED_DRAFTS = "It draws drafts at the temperature alone: give filter_draft=false."
SAME_VOCABULARY = "Its draft model reads the token ids of the target: leave vocabulary out."
ONE_A_FORWARD = "Its draft model drafts one token a forward: give per_forward=1."
IN_TARGET = "It takes the layers in the target's checkpoint: give a draft that begins with #."


class Setting(NamedTuple):
    """An engine's own configuration of one of our methods."""

    name: str  # the engine's own name of the method; empty: plain decoding
    words: tuple[str, ...] = ()  # options of the command that starts its server
    differs: str = ""  # its differences from mtbench, in sentences
    unbiased: bool = True  # above a temperature of 0 its answers have the target's distribution
    exported: bool = False  # it reads drafts as `mtbench export` writes them
    learns: bool = False  # it drafts from earlier requests of its server, too

    def but(self, differs: str) -> "Setting":
        """Return the setting with one more difference of the engine."""
        return self._replace(differs=f"{self.differs} {differs}".strip())


def _used(sampling: Sampling) -> list[str]:
    return [name for name in FILTERS if sampling.filters and getattr(sampling, name) != getattr(GREEDY, name)]


Table = Mapping[str, Callable[[Any, Mapping[str, str]], Setting | str]]


@dataclass(frozen=True)
class Serving:
    """The model of a server, and its limits."""

    model: str  # folder or GGUF file of the target
    setting: Setting
    rows: int  # requests at the same time
    positions: int  # of a request: prompt and answer
    dtype: str
    threads: int
    options: Sequence[str] = field(default_factory=tuple)  # the engine's own, passed through
    share: float | None = None  # the value of `share_option`; None: its server runs on a CPU
    prefix_cache: bool = False  # it keeps prompts for later ones that begin alike


class ServingEngine(EngineInstallation):
    """A serving engine. Subclasses register with `@SERVING_ENGINES.register(NAME)`."""

    start: ClassVar[tuple[str, ...]]  # arguments of a user's command before the model; empty: there is none
    choices: ClassVar[tuple[str, ...]] = ()  # arms of its own methods in `mtbench choose`
    gguf: ClassVar[bool] = False  # it reads GGUF files only; else folders of safetensors only
    gguf_dtype: ClassVar[str | None] = None  # of the matrices in a file that is made for it; None: that of the run
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")  # in which it computes
    overridable: ClassVar[tuple[str, ...]] = ()  # options of its server that mtbench sets, and `--engine-option` may
    same_output: ClassVar[tuple[str, ...]] = ()  # options of its server that must give the same tokens
    start_s: ClassVar[float] = 60.0  # guess of the time of a start, until one is measured
    share_option: ClassVar[str] = ""  # option of its server: the part of a GPU's memory that it takes; empty: no GPU
    share_of_free: ClassVar[bool] = False  # it is a part of what is free when the server starts, not of all
    beside_bytes: ClassVar[int] = 0  # of a GPU's memory, that its server takes beside that part
    work_bytes: ClassVar[int] = 1 << 30  # in that part, beside weights, keys and values: activations, graphs
    splits: ClassVar[tuple[str, ...]] = ()  # options of its server: on how many GPUs a model is divided
    health: ClassVar[str] = "/health"  # page that answers 200 once the server is ready
    variables: ClassVar[Mapping[str, str]] = {}  # environment variables of its process
    text: ClassVar[bool] = True  # its server takes and gives text too, so that a third-party client can load it
    parallel: ClassVar[bool] = False  # it has P-EAGLE
    translates: ClassVar[bool] = False  # its draft models may have vocabularies of their own
    caches: ClassVar[bool] = False  # it may keep prompts, and says how many tokens of a prompt it had kept
    constraint: ClassVar[Any] = None  # JSON schema -> fields of a request that hold its answer to it; None: it has none
    filters: ClassVar[tuple[str, ...]] = FILTERS  # of `Sampling`, in the order in which its server applies them
    fields: ClassVar[Mapping[str, Any]] = {}  # of a request of others' clients: without a cache of prompts
    # Our method -> its setting, or why there is none, from the method's options and the drafts' names by role.
    methods: ClassVar[Table]

    # --- Which methods it has ---

    def setting(self, method: Method, drafts: Mapping[str, str]) -> Setting | str:
        """Return the engine's setting for a method with these options, or in a sentence why it has none.

        `drafts`: role -> name of the checkpoint.
        """
        if method.name not in self.methods:
            return f"{self.title} has no {method.name}."
        if len(method.variants) > 1:
            return f"{self.title} has fixed widths; give a number in place of `auto`."
        for draft in filter(None, map(known_draft, drafts.values())):
            if draft.parallel and not self.parallel:
                return NO_PARALLEL
            if not draft.served:
                return NO_SUCH_DRAFT
        if method.translates and not self.translates:
            return SAME_VOCABULARY
        if getattr(method, "filter_draft", False):
            return NO_FILTERED_DRAFTS
        return self.methods[method.name](method, {role: self.file(source, "DRAFT") for role, source in drafts.items()})

    def filters_with(self, setting: Setting) -> Sequence[str]:
        """Return the filters of `Sampling` that its server has with a setting, in its order."""
        return self.filters

    def lacking(self, setting: Setting, sampling: Sampling) -> str | None:
        """Return in a sentence which filter of a sampling its server lacks with a setting; None: it has all."""
        missing = [name for name in _used(sampling) if name not in self.filters_with(setting)]
        drafting = f" with {setting.name}" if setting.name else ""
        off = f"--{missing[0].replace('_', '-')} {getattr(GREEDY, missing[0]):g}" if missing else ""
        return f"{self.title} has no {missing[0]}{drafting}: give `{off}`, or leave that out." if missing else None

    def other_filtering(self, setting: Setting, sampling: Sampling) -> str:
        """Return how its server filters tokens in another way than `sampling.filtered`; empty: alike.

        Top-p depends on the filters before it, and no other filter does.
        """
        used = _used(sampling)
        own = [name for name in self.filters_with(setting) if name in used]
        alike = sampling.top_p == 1 or {*own[: own.index("top_p")]} == {*used[: used.index("top_p")]}
        return "" if alike else f"{self.title} filters by {', then '.join(own)}"

    def may_change_tokens(self, option: ServerOption, dtype: str) -> bool:
        """Return whether an option of its server may change tokens: not one that the dtype or the engine sets alike."""
        alike = dtype in self.dtypes and option.words in {*itertools.pairwise(self.computing(dtype))}
        return not alike and option.value != AUTO and option != PREFIX_CACHE and option.name not in self.same_output

    def command(self, model: str, setting: Setting) -> str:
        """Return a command that starts a server with a model, as text for a shell."""
        return shlex.join([*self.program(self.installed()), self.file(model), *setting.words])

    def program(self, python: Path | None) -> Sequence[str]:
        """Return a command before the model. `python`: the Python or program of an installation; None: none."""
        return self.start

    def computing(self, dtype: str) -> tuple[str, ...]:
        """Return the options of a command with which its server computes in a dtype."""
        return ()

    def note(self, model: str, setting: Setting) -> str:
        """Return its differences, and whether it needs another format of the checkpoint's files."""
        if setting.exported:
            setting = setting.but(f"Write the draft's files with `mtbench export DRAFT --for {self.name} --out DIR`.")
        if self.file(model) != model:
            setting = setting.but(f"It needs the checkpoint as {'a GGUF file' if self.gguf else 'safetensors'}.")
        return setting.differs

    def file(self, model: str, placeholder: str = "MODEL") -> str:
        """Return the name of a checkpoint's files in the engine's format; where that is unknown, a name for it."""
        if self.gguf:
            return model if model.endswith(GGUF) else Path(model).name + GGUF
        return placeholder if model.endswith(GGUF) else model

    def refuse(self, source: str) -> None:
        """Raise UserError for a checkpoint without files in the engine's format, which mtbench cannot write in it.

        No weights are needed. What else the engine cannot serve, it refuses itself, in its log.
        """
        if gguf.is_gguf(source):
            if not self.gguf:
                families.locate(source)
            return
        folder = Path(families.path_of(source))
        if not folder.is_dir():
            return  # a hub id is downloaded later
        if self.gguf:
            if (folder / CONFIG).is_file():
                gguf_writer.settings(folder)
            check_files(folder)
        elif not stored_bytes(folder) and not (folder / CONFIG).is_file():
            raise UserError(
                f"checkpoint {source!r} has no {CONFIG}, which {self.title} reads; give another with `--checkpoint "
                "ROLE=PATH_OR_ID`."
            )

    def other_weights(self, source: str) -> str | None:
        """Return in words how the weights that it computes with are not those of mtbench; None if they are."""
        types = gguf.types_of(source) if self.gguf and gguf.is_gguf(source) else None
        if types is None or gguf.FLOATS.issuperset(types):
            return None
        made = gguf.dequantised(gguf.file_of(source).name, types)
        return f"{self.title} computes with the quantised weights, mtbench with {made}"

    def prepared(self, source: str, dtype: str, *, offline: bool) -> str:
        """Return the path of a checkpoint in the engine's format. A converted copy is made once, in the cache.

        A hub id is downloaded. Raises UserError if that fails, or if the checkpoint cannot be written so.
        """
        if self.gguf and gguf.is_gguf(source):
            return str(gguf.file_of(source))
        folder = downloaded(families.locate(source), offline=offline)
        if self.gguf:
            check_files(folder)  # it may have changed since the plan was made
        elif not stored_bytes(folder):
            raise MissingWeights(f"checkpoint {source!r} has no weights; download them to {str(folder)!r}.")
        return str(gguf_writer.written(folder, self.gguf_dtype or dtype) if self.gguf else folder)

    def prepared_arm(
        self, method: Method, checkpoints: Mapping[str, str], on: str, dtype: str, *, offline: bool
    ) -> tuple[str, Setting]:
        """Prepare all checkpoints of a planned arm; return the target's path and the arm's setting.

        `checkpoints`: by role; `on`: the target's.
        """
        held = {role: self.prepared(source, dtype, offline=offline) for role, source in checkpoints.items()}
        target = held[on]
        setting = self.setting(method, held)
        if isinstance(setting, Setting) and setting.exported:
            for role in held.keys() - {on} or {on}:  # a draft without a role lies beside the target
                held[role] = str(linked_with(Path(held[role]), self.layout(Path(held[role]))))
            setting = self.setting(method, held)
        assert isinstance(setting, Setting), "planning refuses a method that the engine does not have"
        return self.target(target), setting

    def target(self, path: str) -> str:
        """Return the path of a prepared target for the server: a copy if it would read other files."""
        return path

    def scheduled(self, settings: Mapping[int, Setting]) -> Setting | None:
        """Return one setting that has each batch size's own; None if the engine has no such setting.

        Settings differ. A plain one is among them where drafts do not pay.
        """
        return None

    def synthetic(self, setting: Setting, rates: Sequence[float]) -> Setting | str:
        """Return the setting with simulated acceptance, or a sentence that says why the engine has none.

        `rates`: the chance that the draft at each depth is accepted, with all before it; they fall.
        """
        return f"{self.title} has no synthetic acceptance."

    def layout(self, draft: Path) -> Layout:
        """Return how the draft in a folder must be written, so that the engine loads it."""
        return Layout()

    # --- How its server starts and gets requests ---

    def on_gpu(self) -> bool:
        """Return whether its server computes on a GPU where there is one."""
        return bool(self.share_option)

    def share(self, given_bytes: int, total_bytes: int, free_bytes: int) -> float:
        """Return the value of `share_option` with which its server takes so much of a GPU's memory, rounded down."""
        of_bytes = free_bytes if self.share_of_free else total_bytes
        return math.floor(1e4 * (given_bytes - self.beside_bytes) / of_bytes) / 1e4

    def usual_start_s(self, options: Sequence[ServerOption], *, gpu: bool) -> float:
        """Return a guess of the time of a start with these options of the server. gpu: on a GPU."""
        return self.start_s

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        """Return the command that starts the server on a port of this machine."""
        raise NotImplementedError

    def environment(self, python: Path) -> Mapping[str, str]:
        """Return the environment variables of its process."""
        return self.variables

    def started(self, python: Path, serving: Serving, port: int = PORT) -> list[str]:
        """Return the command that starts the server, with its environment variables: for a process or a shell."""
        variables = {"OMP_NUM_THREADS": str(serving.threads), **self.environment(python)}
        return ["env", *(f"{name}={value}" for name, value in variables.items()), *self.launch(python, serving, port)]

    def program_file(self, text: str) -> str:
        """Return the path of a file in the cache that holds a server of the engine's library."""
        file = cache_home() / "engines" / f"serve-{self.name}.py"
        write_text(file, text)
        return str(file)

    def served(self, server: Server) -> str:
        """Return the server's name for the model."""
        return server.models()[0]

    def constrained(self, request: Request) -> Mapping[str, Any]:
        """Return the fields that hold the answer to a request to its JSON schema; none if it has no schema."""
        return {} if self.constraint is None or request.json_schema is None else self.constraint(request.json_schema)

    def complete(self, server: Server, requests: Sequence[Request], model: str, *, ignore_eos: bool) -> list[Reply]:
        """Send requests at once; return the replies, with their token ids. Raises ServerError.

        A request that lacks a setting of its `sampling` would have the server's own default.
        """
        own = [{"seed": request.seed, **self.constrained(request)} for request in requests]
        bodies = [body_of(request, model, ignore_eos=ignore_eos) for request in requests]
        return server.complete([body | settings for body, settings in zip(bodies, own, strict=True)])
