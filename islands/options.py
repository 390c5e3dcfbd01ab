"""The options that several commands share: each with its name, its kind and its help, once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="NAME|FILES", help="python-docs, or a path or glob of text files."
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Local steps of each worker.")]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME[:KEY=VALUE,…]",
        help="A method and its settings; give it several times.",
    ),
]
FaultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND:KEY=VALUE,…",
        help="Something that goes wrong, e.g. drop:probability=0.5; give it several times.",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="A Ray cluster; default RAY_ADDRESS or a local one."
    ),
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="Without Ray, in this process; same results.")
]
FigureOption = Annotated[
    Path | None, typer.Option("--figure", metavar="FILE.png", help="Also draw a picture.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="The result as JSON on stdout, and nothing else there.")
]
