"""`mtbench serve`: its options. The server is in mtbench/serving, which is imported when the command runs."""

import os
from importlib.util import find_spec
from typing import Annotated

import typer

from mtbench.cli.parameters import command, record_of
from mtbench.cli.session import importing, say, warn
from mtbench.errors import FAILED, UserError
from mtbench.options import common
from mtbench.options.common import COMPARED, SERVER
from mtbench.options.fields import option
from mtbench.plan.request import RunRequest, SamplingOptions

app = typer.Typer()
PACKAGES = ("starlette", "uvicorn", "prometheus_client")


@app.command()
@command
def serve(
    ctx: typer.Context,
    method: Annotated[str, option("Method as NAME[:option=value,…]. See `mtbench ls methods`.", COMPARED)],
    plugin: common.Plugins = (),
    engine: common.Engine = "graph",
    family: common.Family = None,
    model: common.Model = None,
    checkpoint: common.Checkpoints = {},  # noqa: B006
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    offline: common.Offline = False,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    sampling_source: common.SamplingSource = "own",
    chat_template_date: common.ChatTemplateDate = None,
    max_num_seqs: common.MaxNumSeqs = 8,
    max_length: Annotated[
        int | None, option("Tokens of a prompt and its answer; default: the context, at most 4096.", SERVER, ge=2)
    ] = None,
    max_new_tokens: Annotated[
        int, option("Tokens of an answer whose request does not say how many.", SERVER, ge=1, le=common.MOST_NEW_TOKENS)
    ] = 256,
    max_queue: common.MaxQueue = 64,
    host: Annotated[str, option("Address to listen at.", SERVER)] = "127.0.0.1",
    port: Annotated[int, option("Port to listen at; 0: a free one.", SERVER, ge=0, le=65535)] = 8000,
    api_key_env: Annotated[
        str | None, option("Environment variable with the key that clients must send.", SERVER)
    ] = None,
    request_timeout_s: common.RequestTimeout = 300.0,
) -> None:
    """Serve one method by OpenAI's API, to measure it as a service.

    Answers /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics. The options of
    sampling hold for requests without their own fields. A request may set an option of the method,
    such as {"tau": 0.8}.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"`mtbench serve` needs {', '.join(missing)}; run `pip install {' '.join(missing)}`.")
    with importing():
        from mtbench import kernels
        from mtbench.lineup.model_sampling import with_sampling
        from mtbench.serving import served, server
        from mtbench.serving.app import Limits

    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise UserError(f"--api-key-env {api_key_env}: the environment variable is not set; set it to the key.")
    drawing = record_of(ctx, SamplingOptions)  # has the options that are given
    request = RunRequest(
        family=family,
        model=model,
        checkpoint=checkpoint,
        engine=(engine,),
        dtype=dtype,
        device=device,
        offline=offline,
        chat_template_date=chat_template_date,
        **{name: getattr(drawing, name) for name in drawing.model_fields_set},
    )
    loaded = served.load(with_sampling(request, [method]), method, max_num_seqs, max_length)
    for note in kernels.notes(kernels.off()):
        warn(note)
    limits = Limits(
        max_new_tokens=max_new_tokens,
        max_queue=max_queue,
        request_timeout_s=request_timeout_s,
        api_key=key,
    )
    try:
        server.run(loaded, limits, say, host=host, port=port)
    except server.DecodingError as error:
        warn(f"error: {error}")
        raise typer.Exit(FAILED) from None
