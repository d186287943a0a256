"""`planner import FILE`: another planner's graph as a profile, which `solve` plans for."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.inputs import PROFILES_FOLDER
from planner.cli.output import say, write_json, write_table
from planner.cli.profile import profile_json
from planner.errors import UsageError


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="PipeDream's graph.txt, or JSON of Piper or dnn-partitioning.")
    ],
    rows: Annotated[int, typer.Option(metavar="N", help="Rows of the minibatch (microbatch) that the file is of.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU type whose times these are: v100-sxm-32gb, or a .toml."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here (profiles/NAME.json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Import another planner's profile: it can be solved, but there is no model to write code for."""
    if rows < 1:
        raise UsageError(f"--rows {rows} is less than 1", hint="give the rows of the minibatch that was measured")
    if not file.is_file():
        raise UsageError(f"{file} is no file", hint="give a graph.txt, or a JSON file of Piper or dnn-partitioning")
    from planner.cluster import read_gpu
    from planner.model_profile import write_profile
    from planner.peers.formats import format_of, read_imported
    from planner.peers.imported import imported_profile

    if gpu is not None:
        read_gpu(gpu)
    planner = format_of(file)
    result = imported_profile(read_imported(file, planner), file, planner=planner, rows=rows, gpu=gpu)
    path = output or PROFILES_FOLDER / f"{result.name}.json"
    write_profile(result, path)
    say(f"{file} is of {planner}; one minibatch there is {rows} row{'s' if rows > 1 else ''} here (--rows)")
    if as_json:
        for note in result.notes:
            say(f"note: {note}")
        write_json(profile_json(result, rows=rows))
    else:
        from planner.report import profile_table

        write_table(profile_table(result))
    say(f"wrote {path}")
