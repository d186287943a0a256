"""Refuses generated code that is more than calls of layers and tensor functions, before it is written.

Names of a profile are validated where it is read; this is the second check, on the finished text. It lists what
generated code may hold: everything else, whatever it came from, is an error.
"""

import ast
from collections.abc import Iterator
from typing import NoReturn

from planner.arguments import constant_name, dtype_name
from planner.errors import EmitError
from planner.names import attribute_name, function_name, method_name, qualified_name

_NAMESPACES = {"torch": "torch", "F": "torch.nn.functional", "operator": "operator", "math": "math"}
_HELPERS = {
    "Value",
    "Output",
    "TensorParallel",
    "Column",
    "Row",
    "Vocabulary",
    "PlanStage",
    "enter",
    "layers",
    "draws_apart",
}
_HELPERS |= {"Slices", "sum_ranks", "scatter_sum", "gather_slices", "take_slice", "on_first"}
_CALLABLE = _HELPERS | {"named_tuple", "recompute", "tuple", "range", "slice", "float", "getattr"}
_CONTEXTS = (["torch.no_grad()"], ["draws_apart(self.tp_group)"])
_NODES = (
    *(ast.Module, ast.FunctionDef, ast.ClassDef, ast.arguments, ast.arg, ast.Assign, ast.Expr, ast.Return, ast.For),
    *(ast.With, ast.withitem, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Slice, ast.Name, ast.Constant),
    *(ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.IfExp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator),
    *(ast.unaryop, ast.cmpop, ast.expr_context, ast.GeneratorExp, ast.DictComp, ast.comprehension, ast.JoinedStr),
    ast.FormattedValue,
)


def check_generated(text: str) -> None:
    """Raise EmitError where the generated part of a plan is no code, or holds what no program can ask for."""
    tree = _parse(text)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            if [ast.unparse(base) for base in statement.bases] != ["PlanStage"] or statement.keywords:
                _refuse(statement)
            members: list[ast.stmt] = statement.body
        else:
            members = [statement]
        for member in members:
            if not isinstance(member, ast.FunctionDef | ast.Assign) and not _is_text(member):
                _refuse(member)
            if member is statement and _is_text(member):
                _refuse(member)
        if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name):
            _refuse(statement)
    known = {target.id for node in ast.walk(tree) for target in _assigned(node)}
    for scope in _scopes(tree):
        _check_scope(scope, known)


def check_header(text: str) -> None:
    """Raise EmitError where what stands before the helpers is more than a docstring, imports and one literal."""
    first, *rest = _parse(text).body
    if not _is_text(first):
        _refuse(first)
    for statement in rest:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PLAN":
            try:
                ast.literal_eval(statement.value)
            except ValueError:
                _refuse(statement)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            _refuse(statement)


def _parse(text: str) -> ast.Module:
    try:
        compile(text, "plan.py", "exec", dont_inherit=True)  # finds more than the parser does; nothing is run
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EmitError(f"the profile makes no valid code: {error}", hint="profile the model again") from None


def _refuse(node: ast.AST) -> NoReturn:
    shown = ast.unparse(node).splitlines()[0][:80]
    raise EmitError(f"a plan may not hold the code {shown!r}", hint="profile the model again") from None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _assigned(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield every function, and every statement outside of one."""
    for statement in tree.body:
        yield from statement.body if isinstance(statement, ast.ClassDef) else [statement]


def _check_scope(scope: ast.AST, module_level: set[str]) -> None:
    nodes = list(ast.walk(scope))
    bound = {target.id for node in nodes for target in _assigned(node)}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self"}
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    if (bound | arguments) & {*_NAMESPACES, "self"}:
        _refuse(scope)
    local = bound | arguments
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if not isinstance(node, _NODES) or getattr(node, "decorator_list", None):
            _refuse(node)
        if isinstance(node, ast.FunctionDef) and (node is not scope or node.args.defaults or node.args.kw_defaults):
            _refuse(node)
        if isinstance(node, ast.With) and [ast.unparse(item) for item in node.items] not in _CONTEXTS:
            _refuse(node)
        if isinstance(node, ast.Call):
            _check_call(node, local)
        elif isinstance(node, ast.Attribute) and id(node) not in called:
            _check_attribute(node, is_inner=id(node) in inner)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            known = local | module_level | functions | _CALLABLE | {*_NAMESPACES, "self"}
            if node.id not in known and not _is_generated(node.id):
                _refuse(node)


def _is_generated(name: str) -> bool:
    """Stages and divided forwards: the names of the statements themselves."""
    return name.startswith("Stage") or name.endswith("_forward")


def _root(node: ast.expr) -> tuple[ast.expr, list[str]]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return node, names


def _is_submodule(node: ast.expr) -> bool:
    """`self.get_submodule("name")`, whose argument is a text."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self.get_submodule"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
    )


def _check_call(node: ast.Call, local: set[str]) -> None:
    root, names = _root(node.func)
    named = root.id if isinstance(root, ast.Name) else ""
    try:
        if not names and named:
            if named != "layer" and (named in local or named not in _CALLABLE):
                _refuse(node)
            if named == "getattr":
                qualified_name(ast.literal_eval(node.args[1]))
        elif named in _NAMESPACES and named not in local:
            dotted = ".".join([_NAMESPACES[named], *names])
            if dotted != "torch.no_grad":
                function_name(dotted)
        elif _is_submodule(node):
            qualified_name(ast.literal_eval(node.args[0]))
        elif named == "self" or _is_submodule(root):
            _check_path(names)
        elif names and (named or (isinstance(root, ast.Call) and ast.unparse(root.func) == "getattr")):
            for name in names[:-1]:
                attribute_name(name)
            method_name(names[-1])
        else:
            _refuse(node)
    except (ValueError, IndexError):
        _refuse(node)


def _check_path(names: list[str]) -> None:
    """Refuse a path that is neither that of a module nor a method of a parameter (whose own names come last)."""
    try:
        qualified_name(".".join(names))
    except ValueError:
        qualified_name(".".join(names[:-1]))
        if len(names) < 2:
            raise
        method_name(names[-1])


def _check_attribute(node: ast.Attribute, *, is_inner: bool) -> None:
    root, names = _root(node)
    try:
        if isinstance(root, ast.Name) and root.id in _NAMESPACES:
            if is_inner:
                return  # part of a longer path, which is looked at whole
            if root.id != "torch" or len(names) != 1:
                _refuse(node)
            try:
                constant_name(names[0])
            except ValueError:
                dtype_name(names[0])
            return
        for name in names:
            attribute_name(name)
    except ValueError:
        _refuse(node)
