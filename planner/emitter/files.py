"""Writes plan.py without losing what people edited, and reads the plan back without running it."""

import ast
from pathlib import Path
from typing import Any

from planner.emitter.source import HASH_LINE, content_hash
from planner.errors import FileFormatError, UsageError
from planner.plan import PLAN_VERSION, Plan
from planner.records import read_text, validate, write_text


def write_plan(source: str, path: Path, *, force: bool = False) -> None:
    """Write the source of a plan; UsageError, without `force`, if the file there was edited or is none of ours."""
    if path.exists() and not force:
        text = read_text(path, what="plan")
        _, found, recorded = text.rpartition(f"\n{HASH_LINE}")
        if not found:
            raise UsageError(
                f"{path} exists and is no file that planner wrote",
                hint="give another name with -o, or --force to replace it",
            )
        if recorded.strip() != content_hash(text):
            raise UsageError(
                f"{path} was edited by hand", hint="give another name with -o, or --force to lose the edits"
            )
    write_text(path, source)


def read_plan(path: Path) -> Plan:
    """Return the plan in a plan.py: its PLAN literal is read as data, the file is not run."""
    text = read_text(path, what="plan")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise FileFormatError(
            f"{path}: not Python at line {error.lineno}: {error.msg}", hint="solve again to write it anew"
        ) from None
    for statement in tree.body:
        targets: list[Any] = statement.targets if isinstance(statement, ast.Assign) else []
        if (
            targets
            and isinstance(targets[0], ast.Name)
            and targets[0].id == "PLAN"
            and isinstance(statement, ast.Assign)
        ):
            try:
                data = ast.literal_eval(statement.value)
            except ValueError:
                raise FileFormatError(
                    f"{path}: PLAN is not a literal", hint="PLAN may hold only numbers, text, lists and dicts"
                ) from None
            version = data.get("plan_version") if isinstance(data, dict) else None
            if isinstance(version, int) and version > PLAN_VERSION:
                raise FileFormatError(
                    f"{path}: plan_version {version} is newer than {PLAN_VERSION}, the newest this planner reads",
                    hint="upgrade planner, or solve again with this version",
                )
            return validate(Plan, data, source=f"{path}: PLAN")
    raise FileFormatError(
        f"{path}: has no PLAN", hint="this is no plan that planner wrote; write one with `planner solve`"
    )
