"""`planner profile MODEL`: layers, structure and costs of a model, to a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.inputs import PROFILES_FOLDER
from planner.cli.options import parse_counts
from planner.cli.output import progress_bar, say, user_code, write_json, write_table
from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.model_profile import ModelProfile

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py, model.py:make, or a file or folder with config.json.")
    ],
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Measure on this device (default: the GPU, else the CPU).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compute for this GPU type, none needed: h100-sxm, or a .toml.")
    ] = None,
    microbatch_sizes: Annotated[
        str | None, typer.Option(metavar="N,N", help="Rows per microbatch to profile, like 1,2,4.")
    ] = None,
    tp: Annotated[
        str | None, typer.Option(metavar="N,N", help="Tensor-parallel degrees to profile, like 1,2,4.")
    ] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="Build the model in this dtype.")] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file's function that makes inputs (example_inputs).")
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help="Lists whose members are the layers, like model.layers (found by itself)."
        ),
    ] = None,
    tp_rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=STYLE",
            help="How a part is divided over tensor-parallel ranks: column, row, vocabulary or replicated, like "
            "'layers.*.mlp.up=column' (worked out by itself).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here (profiles/NAME.json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Profile a model: its layers, what flows between them, and what each costs."""
    sizes = parse_counts(microbatch_sizes, "--microbatch-sizes")
    degrees = parse_counts(tp, "--tp")
    if device and gpu:
        raise UsageError(
            f"--device {device} measures and --gpu {gpu} computes: they exclude each other", hint="give one of the two"
        )
    if output is not None and output.suffix == ".py":
        raise UsageError(f"-o {output}: a profile is JSON, and this names Python code", hint="give a name.json")
    from planner.model_profile import write_profile
    from planner.profiler import profile_model
    from planner.tp_rules import parse_rules

    rules = parse_rules(tp_rule or ())
    with progress_bar("profile") as progress, user_code(model):
        result = profile_model(
            model,
            device=device,
            gpu=gpu,
            microbatch_sizes=sizes,
            tp_degrees=degrees,
            dtype=dtype,
            inputs=inputs,
            blocks=tuple(part.strip() for part in blocks.split(",")) if blocks else (),
            refuse_degrees=degrees is not None,
            tp_rules=rules,
            progress=progress,
        )
    path = output or PROFILES_FOLDER / f"{result.name}.json"
    write_profile(result, path)
    if as_json:
        for text in result.notes:
            say(f"note: {text}")
        write_json(profile_json(result, rows=min(sizes) if sizes else 1))
    else:
        from planner.report import profile_table

        write_table(profile_table(result))
    say(f"wrote {path}")


def profile_json(profile: "ModelProfile", *, rows: int) -> dict[str, Any]:
    """Return what scripts may rely on of a profile; `forward_flops` is for a batch of `rows`."""
    return {
        "name": profile.name,
        "param_count": profile.param_count,
        "trainable_param_count": profile.trainable_param_count,
        "forward_flops": profile.forward_flops_per_row * rows,
        "num_layers": len(profile.layers),
        "num_layer_classes": len(profile.layer_classes),
        "tied": [list(group) for group in profile.tied],
    }
