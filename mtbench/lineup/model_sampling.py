"""`--sampling model`: tokens are drawn as a checkpoint's own generation settings say, read as transformers reads them.

That is greedily, unless `do_sample` is true. One law holds for all arms of a run.
"""

from collections.abc import Sequence

from pydantic import ValidationError

from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.lineup import family_of
from mtbench.models import gguf
from mtbench.models.families import PART
from mtbench.models.loading import generation_settings
from mtbench.options.fields import as_words
from mtbench.plan.request import RunRequest
from mtbench.records import finding

DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}  # transformers', of what the settings do not say
# What else changes tokens: `_get_logits_processor` and the modes of `generate` in transformers 5; vLLM; llama.cpp.
UNLESS_ONE = ("repetition_penalty", "encoder_repetition_penalty", "typical_p", "num_beams", "guidance_scale")
UNLESS_NONE = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "top_h", "epsilon_cutoff", "eta_cutoff", "bad_words_ids"),
    *("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config", "penalty_alpha"),
    *("dola_layers", "presence_penalty", "frequency_penalty", "stop_strings", "xtc_probability", "mirostat"),
)


def with_sampling(request: RunRequest, specs: Sequence[str] = ()) -> RunRequest:
    """Return the request of a plan: with `sampling_source` model, what it does not say is that of its targets.

    `specs`: its arms; empty: those of the request, else all that its checkpoints may have. Raises UserError if settings
    cannot be read or applied, and if those of two targets differ.
    """
    if request.sampling_source == "own":
        return request
    methods = [METHODS[name] for name in METHODS]
    every = [spec for method in methods for spec in (*method.default_arms, *method.choices)]
    arms, found = parse_arms(specs or request.method or every, request.engine), dict[str, RunRequest]()
    for family in (family_of(request, spec) for spec in request.suite):
        for arm in arms:
            if all(role.partition(PART)[0] in ("", *family.roles) for role in arm.roles):
                source = family.checkpoint(arm.on)
                found[source] = found.get(source) or _of_target(request, source)
    different = {str(each.sampling): source for source, each in found.items()}
    if len(different) > 1:
        listed = "; ".join(f"{source!r}: {words}" for words, source in different.items())
        raise UserError(
            f"--sampling model: the arms' checkpoints differ, {listed}; all arms of a run are sampled alike: give "
            "`--temperature` and filters, or arms of one checkpoint by `--method`."
        )
    return next(iter(found.values()), request)


def _of_target(request: RunRequest, source: str) -> RunRequest:
    settings, file = generation_settings(source, offline=request.offline)
    where = f"--sampling model: {file} of {source!r}"
    if gguf.is_gguf(source) and not settings.do_sample:
        raise UserError(f"{where} has no key general.sampling.temp; give `--temperature` and filters instead.")
    named = {name: value for name in DRAWN if (value := getattr(settings, name)) is not None}
    drawn = DRAWN | named if settings.do_sample else {"temperature": 0.0}
    try:
        resolved = request.changed(**{n: value for n, value in drawn.items() if n not in request.model_fields_set})
    except ValidationError as error:
        raise UserError(f"{where}: {finding(error)}; give `--temperature` and filters instead.") from None
    every = {name: getattr(settings, name, None) for name in (*UNLESS_ONE, *UNLESS_NONE)}
    if others := [f"{n}={value}" for n, value in every.items() if value and (value != 1 or n in UNLESS_NONE)]:
        words = as_words({name: getattr(resolved, name) for name in DRAWN}, RunRequest)
        raise UserError(f"{where} has {others[0]}, which no arm applies; without it, give `{' '.join(words)}` instead.")
    return resolved
