"""The command line. Parsing and printing only; each command is a function of the library.

Exit codes: 0 done, 2 the input was wrong, 1 the run failed, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from islands.command_line import exit_codes, numbers, print_json, refuse_others
from islands.errors import InputError
from islands.options import (
    AddressOption,
    ClusterOption,
    ConfigOption,
    DataOption,
    FaultOption,
    FigureOption,
    InProcessOption,
    JsonOption,
    MethodOption,
    MethodsOption,
    ModelOption,
    QuietOption,
    SetOption,
    StepsOption,
)

if TYPE_CHECKING:
    from islands.bench import BenchResult
    from islands.bench_fragments import FragmentsBench
    from islands.bench_network import NetworkBench

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


@app.command(
    "run", epilog="Example: islands run --method diloco --set method.sync_every=10 --steps 500"
)
def run_command(
    cluster: ClusterOption = None,
    method: MethodOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random draw.")] = None,
    overrides: SetOption = None,
    faults: FaultOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Result folder; default a fresh one in runs/."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that the folder holds.")
    ] = False,
    address: AddressOption = None,
    in_process: InProcessOption = False,
    transfers: Annotated[
        Literal["links", "each"],
        typer.Option(help="Rows of the transfers table: per round and link, or per transfer."),
    ] = "links",
    clock: Annotated[
        Literal["emulated", "wall"] | None,
        typer.Option(
            help="wall: hold deliveries back until they are due, at the pace of the real world."
        ),
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            "--time-scale",
            metavar="FACTOR",
            help="Wall clock: wall seconds per emulated second; default 1.",
        ),
    ] = None,
    quiet: QuietOption = False,
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
        "faults": faults,
        "clock": clock,
        "time_scale": time_scale,
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
        print_json({**result.summary, "folder": str(result.folder)})
    elif not quiet:
        print_final(result.summary, result.folder)


@app.command(
    "compare",
    epilog="Example: islands compare --method dense --method diloco:sync_every=10 "
    "--lr 0.003,0.01,0.03 --seeds 3",
)
def compare_command(
    methods: MethodsOption = None,
    lr: Annotated[
        str | None,
        typer.Option("--lr", metavar="LR,LR,…", help="Learning rates that each method tries."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N|SEED,…", help="So many from 0, or a list of them."),
    ] = None,
    target_loss: Annotated[
        float | None, typer.Option("--target-loss", help="Validation loss to be reached.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option("--study", metavar="FILE", help="A study file, instead of --method."),
    ] = None,
    cluster: ClusterOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    overrides: SetOption = None,
    faults: FaultOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The study's folder, new or one to go on with."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Train again what is finished already.")
    ] = False,
    address: AddressOption = None,
    in_process: InProcessOption = False,
    figure: FigureOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods, each at the best of its learning rates, over several seeds.

    Runs that are finished in --out are not trained again.
    """
    from islands.comparison import compare
    from islands.figures import check_figure, draw_comparison
    from islands.results.study_tables import print_comparison
    from islands.study import Study, study_of

    options: dict[str, object] = {
        "cluster": cluster,
        "model": model,
        "data": data,
        "steps": steps,
        "faults": faults,
    }
    with exit_codes():
        if (study is None) == (not methods):
            raise InputError("method: give --method at least once, or --study; not both")
        changes = {
            "lr": numbers("lr", lr),
            "seeds": numbers("seeds", seeds, count=True),
            "target_loss": target_loss,
        }
        if study is None:
            wanted = study_of(methods or (), config, overrides or (), options, **changes)
        elif config is None:
            wanted = Study.load(study, overrides or (), options, **changes)
        else:
            raise InputError("config: a study file has its own experiment; leave --config out")
        check_figure(figure)
        found = compare(
            wanted,
            out=out,
            overwrite=overwrite,
            address=address,
            in_process=in_process,
            quiet=quiet,
        )
        if figure is not None:
            draw_comparison(found, figure)
    if as_json:
        print_json(found.as_dict())
    elif not quiet:
        print_comparison(found)


@app.command(
    "scale",
    epilog="Example: islands scale --workers 2,4,8,100,10000 --method dense --method demo "
    "--bytes-only",
)
def scale_command(
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N,N,…", help="Numbers of workers; default 2,4,8,16,32."),
    ] = None,
    methods: MethodsOption = None,
    bytes_only: Annotated[
        bool,
        typer.Option("--bytes-only", help="Train nowhere: carry one real payload for everyone."),
    ] = False,
    cluster: ClusterOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    overrides: SetOption = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the rows and the runs here.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what the folder holds.")
    ] = False,
    address: AddressOption = None,
    in_process: InProcessOption = False,
    figure: FigureOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how bytes and time per step grow with the number of workers.

    The workers are split evenly over the cluster's islands. Without --method: dense, topk, demo
    and diloco.
    """
    from islands.figures import check_figure, draw_scaling
    from islands.results.study_tables import print_scaling
    from islands.scale import METHODS, scale, scale_experiment
    from islands.study import contenders

    options: dict[str, object] = {"cluster": cluster, "model": model, "data": data, "steps": steps}
    with exit_codes():
        check_figure(figure)
        found = scale(
            scale_experiment(config, overrides or (), options),
            contenders(methods or METHODS),
            numbers("workers", workers),
            bytes_only=bytes_only,
            out=out,
            overwrite=overwrite,
            address=address,
            in_process=in_process,
            quiet=quiet,
        )
        if figure is not None:
            draw_scaling(found, figure)
    if as_json:
        print_json(found.as_dict())
    elif not quiet:
        print_scaling(found)


@app.command(
    "retime",
    epilog="Example: islands retime runs/dense-1 runs/diloco-1 "
    "--bandwidth 1Mbit/s,10Mbit/s,…,100Gbit/s",
)
def retime_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Result folders of runs.")
    ],
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="A cluster with as many workers, which are placed in island order; "
            "may be given several times. Default: each run's own.",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,RATE,…",
            help="Constant bandwidths of every link between islands, access line and backbone, "
            "instead of what the cluster says, traces and windows included.",
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,SHARE,…",
            help="Shares of these links that other jobs take, in transfers of the link's own "
            "background size, or of the run's mean payload.",
        ),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="TIME,TIME,…", help="Time per local step; default as recorded."),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            metavar="TIME,TIME,…",
            help="Constant one-way delays of each of these links, instead of its own.",
        ),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option("--target-loss", help="Validation loss to be reached; default the run's own."),
    ] = None,
    figure: FigureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time recorded runs again on other networks, without training.

    All combinations of what is given; without options, the run's own network. Also shows which
    bandwidth each run needs to spend 50, 80, 90, 95 and 99 % of its time computing, to 1 %, from
    its first 200 rounds. A list may have an ellipsis: 1Mbit/s,10Mbit/s,…,100Gbit/s.
    """
    from islands.figures import check_figure, draw_retiming
    from islands.results.retime_tables import print_retiming
    from islands.retime import retime

    with exit_codes():
        check_figure(figure)
        if figure is not None and bandwidth is None:
            raise InputError("figure: it shows utilisation against bandwidth; give --bandwidth")
        found = retime(
            folders,
            clusters or (),
            bandwidth=bandwidth,
            load=load,
            step_time=step_time,
            delay=delay,
            target_loss=target_loss,
        )
        if figure is not None:
            draw_retiming(found, figure)
    if as_json:
        print_json(found.as_dict())
    else:
        print_retiming(found)


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
        print_json(description)
    else:
        print_description(description)


@app.command("links", epilog="Example: islands links --load 0.1,0.5,0.9 --cluster transatlantic")
def links_command(
    cluster: ClusterOption = None,
    load: Annotated[
        str | None,
        typer.Option(metavar="SHARE,SHARE,…", help="Loads; default 0.1,0.3,0.5,0.7,0.9."),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Payload of each worker in the collectives.")
    ] = "10 MB",
    seed: Annotated[int, typer.Option(help="Decides the arrivals.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Hold the emulated network against the textbook, without training.

    How long a newcomer waits in a queue at each load, beside the Pollaczek-Khinchine value, and how
    long collectives take on a cluster, beside the alpha-beta model.
    """
    from islands.links import check_links, print_links, read_loads

    with exit_codes():
        found = check_links(cluster, read_loads(load), size, seed)
    if as_json:
        print_json(found.as_dict())
    else:
        print_links(found)


@app.command("bench", epilog="Example: islands bench --method dense --steps 2000 --repeats 3")
def bench_command(
    context: typer.Context,
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
    network: Annotated[
        bool,
        typer.Option("--network", help="Time the emulated network alone; reads only --repeats."),
    ] = False,
    fragments: Annotated[
        bool,
        typer.Option("--fragments", help="Time 8 fragments; reads only --repeats and --set."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time islands beside a bare loop and a gloo program that train the same, on this machine.

    With --network: the network's event loop beside simpy, a ring of 1,024 workers, and 1,000 flows
    that share 20 links. With --fragments: streaming_diloco with 8 of them beside diloco that
    synchronises 8 times as often.
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with exit_codes():
        result: BenchResult | FragmentsBench | NetworkBench
        if network:
            from islands.bench_network import bench_network

            refuse_others(context, "network", "repeats", "as_json")
            result = bench_network(repeats=repeats, say=say)
        elif fragments:
            from islands.bench_fragments import bench_fragments

            refuse_others(context, "fragments", "repeats", "overrides", "as_json")
            result = bench_fragments(repeats=repeats, overrides=overrides or (), say=say)
        else:
            from islands.bench import bench

            result = bench(
                model=model or "decoder",
                workers=workers,
                method=method,
                sync_every=sync_every,
                steps=steps,
                repeats=repeats,
                overrides=overrides or (),
                say=say,
            )
    if as_json:
        print_json(result.as_dict())
    else:
        result.print()


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
