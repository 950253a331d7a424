"""`mtbench train`: make a checkpoint, from nothing or from another one."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train a checkpoint: from nothing (init), then ar, then mars.")

DataOption = Annotated[str, typer.Option("--data", help="A suite (its training split) or a file FILE.jsonl.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must not exist.")]
CountOption = Annotated[int | None, typer.Option("--examples", help="Conversations to read; default: all.")]
BaseOption = Annotated[str, typer.Option("--base", help="Checkpoint to start from: a folder or a hub id.")]
RateOption = Annotated[float, typer.Option("--learning-rate")]
EpochsOption = Annotated[float, typer.Option("--epochs")]
BatchOption = Annotated[int, typer.Option("--batch-size", min=1, help="Conversations per step.")]
WarmupOption = Annotated[float, typer.Option("--warmup", min=0, max=1, help="Share of the steps.")]
LengthOption = Annotated[int, typer.Option("--max-length", min=2, help="Tokens of a conversation.")]
SeedOption = Annotated[int, typer.Option("--seed")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Of the saved weights: bfloat16 or float32.")]


@app.command()
def init(
    data: DataOption,
    out: OutOption,
    examples: Annotated[int, typer.Option("--examples", help="Conversations to learn the tokenizer from.")] = 20000,
    seed: SeedOption = 42,
    vocab_size: Annotated[int, typer.Option(help="At most; special tokens included.")] = 512,
    width: int = 128,
    feed_forward: int = 384,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    positions: Annotated[int, typer.Option(help="Longest context.")] = 8192,
) -> None:
    """An untrained Qwen2 with a byte-level BPE of its own, learned from the data."""
    from mtbench.train import Settings, initialise

    initialise(
        data,
        examples,
        Settings(seed=seed),
        out,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
    )
    typer.echo(out)


@app.command()
def ar(
    base: BaseOption,
    data: DataOption,
    out: OutOption,
    examples: CountOption = None,
    learning_rate: RateOption = 5e-6,
    epochs: EpochsOption = 5.0,
    batch_size: BatchOption = 384,
    warmup: WarmupOption = 0.03,
    max_length: LengthOption = 512,
    seed: SeedOption = 42,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Next-token training of the last assistant turn (stage 1 of the MARS paper)."""
    from mtbench.train import Settings, train

    settings = Settings(
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        warmup=warmup,
        max_length=max_length,
        seed=seed,
        dtype=dtype,
    )
    typer.echo(train("ar", base, data, examples, settings, out))


@app.command()
def mars(
    base: BaseOption,
    data: DataOption,
    out: OutOption,
    block_size: Annotated[int, typer.Option("--block-size", min=2, help="B: tokens of a block.")] = 4,
    examples: CountOption = None,
    learning_rate: RateOption = 5e-6,
    epochs: EpochsOption = 5.0,
    batch_size: BatchOption = 384,
    warmup: WarmupOption = 0.03,
    max_length: LengthOption = 512,
    seed: SeedOption = 42,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Masked blocks beside next-token training (stage 2 of the MARS paper, as released)."""
    from mtbench.train import Settings, train

    settings = Settings(
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        warmup=warmup,
        max_length=max_length,
        seed=seed,
        dtype=dtype,
    )
    typer.echo(train("mars", base, data, examples, settings, out, block_size=block_size))


if __name__ == "__main__":
    app()
