"""The command line. Parsing and printing only; each command is a function of the library.

Exit codes: 0 done, 2 the input was wrong, 1 the run failed, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from islands.errors import InputError, RunError

app = typer.Typer(
    name="islands",
    help="Train real models on emulated, geographically split clusters, and see what a "
    "low-communication method costs in bytes, time and loss.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE|NAME", help="A shipped cluster or a file.")
]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="A method, or package.module:Class."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="A model, or package.module:build.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. method.sync_every=10."
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="An experiment file to start from.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="The result as JSON on stdout, and nothing else there.")
]


@app.command(
    "run", epilog="Example: islands run --method diloco --set method.sync_every=10 --steps 500"
)
def run_command(
    cluster: ClusterOption = None,
    method: MethodOption = None,
    model: ModelOption = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILES", help="python-docs, or a path or glob of text files."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps of each worker.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random draw.")] = None,
    overrides: SetOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Result folder; default a fresh one in runs/."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that the folder holds.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A Ray cluster; default RAY_ADDRESS or a local one."
        ),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without Ray, in this process; same results.")
    ] = False,
    transfers: Annotated[
        Literal["links", "each"],
        typer.Option(help="Rows of the transfers table: per round and link, or per transfer."),
    ] = "links",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on an emulated cluster and report what it cost.

    With no options: DiLoCo on two islands of two workers, 1,000 steps.
    """
    from islands.config import load_experiment
    from islands.experiment import run
    from islands.results.display import print_final

    options: dict[str, object] = {
        "cluster": cluster,
        "method": method,
        "model": model,
        "data": data,
        "steps": steps,
        "seed": seed,
    }
    with exit_codes():
        experiment = load_experiment(config, overrides or (), options)
        result = run(
            experiment,
            out=out,
            overwrite=overwrite,
            address=address,
            in_process=in_process,
            transfers=transfers,
            quiet=quiet,
        )
    if as_json:
        _print_json({**result.summary, "folder": str(result.folder)})
    elif not quiet:
        print_final(result.summary, result.folder)


@app.command("check", epilog="Example: islands check four_continents --model gpt-15m")
def check_command(
    target: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="A cluster or experiment file, or a name.")
    ],
    model: ModelOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate a cluster or an experiment and print what was understood of it."""
    from islands.check import describe, load_target, print_description

    with exit_codes():
        description = describe(load_target(target, model, overrides or ()))
    if as_json:
        _print_json(description)
    else:
        print_description(description)


@app.command("bench", epilog="Example: islands bench --method dense --steps 2000 --repeats 3")
def bench_command(
    model: ModelOption = "decoder",
    workers: Annotated[int, typer.Option(help="Worker processes, on one island.")] = 4,
    method: Annotated[
        str, typer.Option("--method", metavar="NAME", help="dense, diloco or local_sgd.")
    ] = "diloco",
    sync_every: Annotated[
        int | None, typer.Option(help="Local steps per round; default the method's.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Local steps of each worker.")] = 2000,
    repeats: Annotated[int, typer.Option(help="Interleaved repeats; medians are shown.")] = 3,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time islands beside a bare loop and a gloo program that train the same, on this machine."""
    from islands.bench import bench

    with exit_codes():
        result = bench(
            model=model or "decoder",
            workers=workers,
            method=method,
            sync_every=sync_every,
            steps=steps,
            repeats=repeats,
            overrides=overrides or (),
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if as_json:
        _print_json(result.as_dict())
    else:
        result.print()


def _print_json(value: Any) -> None:
    from islands.results.folder import to_json

    print(to_json(value))


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the failures that a user can cause into one message and the exit code for it."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
