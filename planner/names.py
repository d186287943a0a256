"""Names that a program may hold: of values, modules, functions, methods and attributes.

Profiles are data that strangers may hand in, and plan.py made from them is run: what is not allowed here is refused on
reading.
"""

import keyword
import re
import unicodedata


def identifier(name: str) -> str:
    """Return `name` if it is a Python identifier and no keyword; ValueError otherwise.

    Python reads identifiers in their NFKC form: one that differs from its own would name something else in plan.py.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or not _is_normal(name):
        raise ValueError(f"{name!r} is not an identifier")
    return name


def _is_normal(name: str) -> bool:
    return unicodedata.normalize("NFKC", name) == name


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Attributes through which Python objects that are no tensors lead to the interpreter.
_FRAMES = re.compile(r"__.*__|(gi|cr|ag|tb)_(frame|code|yieldfrom|await|next)|f_(back|builtins|globals|locals|code)")
# What every nn.Module has: no submodule or parameter can be reached by such a name.
_MODULE_METHODS = _words(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float forward get_buffer "
    "get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia named_buffers named_children "
    "named_modules named_parameters parameters register_backward_hook register_buffer register_forward_hook "
    "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook register_module "
    "register_load_state_dict_post_hook register_load_state_dict_pre_hook register_parameter "
    "register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule "
    "share_memory state_dict to to_empty train type xpu zero_grad"
)


def attribute_name(name: str) -> str:
    """Return `name` if a program may read it off a value; ValueError for what leads from objects to the interpreter."""
    if _FRAMES.fullmatch(identifier(name)):
        raise ValueError(f"a program may not read {name!r}")
    return name


def qualified_name(name: str) -> str:
    """Return `name` if it is a dotted module path such as 'layers.3.mlp'; ValueError otherwise.

    Keys of an `nn.ModuleDict` may have dashes and be keywords ('experts.top-2', 'global').
    """
    fine = isinstance(name, str) and _is_normal(name)
    for part in name.split(".") if fine and name else []:
        fine = fine and re.fullmatch(r"[\w-]+", part) is not None
        fine = fine and not _FRAMES.fullmatch(part) and part not in _MODULE_METHODS
    if not fine:
        raise ValueError(f"{name!r} is not the name of a module or parameter (letters, digits, '_', '-', dots)")
    return name


def draw_name(name: str) -> str:
    """Return `name` if it is 'module:function', a function in the file of a module's class; ValueError otherwise.

    The module is '' for the model itself.
    """
    module, _, function = name.partition(":")
    qualified_name(module)
    if _FRAMES.fullmatch(identifier(function)):
        raise ValueError(f"a program may not call {function!r}")
    return name


MAX_NAME_LENGTH = 200


def plain_text(text: str) -> str:
    """Return `text` if it is short, printable and can stand in a docstring; ValueError otherwise."""
    if len(text) > MAX_NAME_LENGTH or not text.isprintable() or set(text) & set("\"'\\{}"):
        raise ValueError(
            f"{text[:40]!r} is no name: up to {MAX_NAME_LENGTH} printable characters, no quotes, backslashes or braces"
        )
    return text


# Functions and methods a program may name: those of tensors in these torch namespaces. Profiles are data that strangers
# may hand in, and plan.py made from them is run, so a name outside is refused on reading.
FUNCTION_NAMESPACES = (
    "torch.nn.functional",
    "torch.special",
    "torch.fft",
    "torch.linalg",
    "torch._C._nn",
    "torch",
    "operator",
    "math",
)
OPERATORS = _words(
    "add sub mul truediv floordiv mod pow matmul neg pos abs invert eq ne lt le gt ge and_ or_ xor lshift rshift"
)
# Of the lower-case public names of torch, those that change the process, read memory or files, or take code.
_FORBIDDEN = _words(
    "load save compile compiler jit hub classes ops fork wait vmap cond while_loop device dtype layout memory_format "
    "qscheme finfo iinfo typename classproperty from_file from_numpy from_dlpack to_dlpack frombuffer "
    "seed initial_seed manual_seed init_num_threads clear_autocast_cache unify_type_list "
    "prepare_multiprocessing_environment thread_safe_generator merge_type_from_type_comment compiled_with_cxx11_abi "
    "no_grad enable_grad inference_mode boolean_dispatch handle_torch_function torch"
)
_FORBIDDEN_STARTS = ("set_", "get_", "import", "parse_", "use_", "are_", "autocast_", "profiler_", "has_torch", "_")
_DUNDERS = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in _words("add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift")
) | {f"__{name}__" for name in _words("neg pos abs invert eq ne lt le gt ge")}
# Methods of tensors that leave the tensor: for numpy (which writes files), other objects, memory, hooks, processes.
_FORBIDDEN_METHODS = _words(
    "numpy tofile dump dumps storage untyped_storage data_ptr set_ share_memory_ as_subclass apply_ map_ map2_ "
    "register_hook register_post_accumulate_grad_hook backward module_load new share_memory"
)
ATTRIBUTES = _words("T H mT mH real imag data grad")


def function_name(name: str) -> str:
    """Return `name` if a program may call it; ValueError otherwise."""
    namespace, _, attribute = name.rpartition(".")
    allowed = namespace in FUNCTION_NAMESPACES and attribute.isidentifier() and attribute.isascii()
    allowed = allowed and attribute not in _FORBIDDEN and not attribute.startswith(_FORBIDDEN_STARTS)
    if not allowed or attribute != attribute.lower() or (namespace == "operator" and attribute not in OPERATORS):
        raise ValueError(f"a program may not call {name!r}")
    return name


def method_name(name: str) -> str:
    """Return `name` if it is a method of tensors that a program may call; ValueError otherwise."""
    private = name.startswith("_") and name not in _DUNDERS
    if not name.isascii() or private or identifier(name) in _FORBIDDEN_METHODS or _leads_out(name):
        raise ValueError(f"a program may not call the method {name!r}")
    return name


def _leads_out(name: str) -> bool:
    return name not in _DUNDERS and _FRAMES.fullmatch(name) is not None
