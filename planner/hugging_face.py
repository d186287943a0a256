"""A Hugging Face `config.json` as a model file: the model, inputs and labels that its configuration describes.

Nothing is downloaded, and code that a configuration names (`auto_map`) is never run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import CaptureError, UsageError
from planner.model_file import ModelFile
from planner.records import read_json

MAX_SEQUENCE = 2048  # tokens per row where the configuration allows more: long enough to be typical of pre-training


def hugging_face_model(path: Path) -> ModelFile:
    """Return the model of a `config.json`, or of the folder that holds one.

    The class is the first of `architectures`, else the causal language model of the configuration. UsageError where
    there is no configuration or transformers is not installed, CaptureError where its kind of input is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UsageError(
            f"folder {str(path)!r} has no config.json", hint="give a Python file with build_model(), or a model folder"
        )
    data = read_json(file, what="Hugging Face configuration")
    if not isinstance(data, dict) or "model_type" not in data:
        raise UsageError(
            f"{file.name} has no 'model_type': not a Hugging Face configuration",
            hint="give a Python file with build_model(), or the config.json of a transformers model",
        )
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"{file.name} needs transformers, which is not installed", hint="install it: pip install 'planner[hf]'"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise CaptureError(
            f"{file.name}: transformers {transformers.__version__} can't read it: {first}",
            hint="write a Python file with build_model() for this model",
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = _model_class(transformers, config, file)
    return ModelFile(
        path=file,
        build=lambda: model_class._from_config(config),
        example_inputs=_example_inputs(config, model_class, file),
    )


def _model_class(transformers: Any, config: Any, file: Path) -> Any:
    for name in config.architectures or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        return mapping[type(config)]
    raise CaptureError(
        f"{file.name}: no class for architectures {config.architectures or []} of model_type {config.model_type!r}",
        hint="write a Python file with build_model() for this model",
    )


def _example_inputs(config: Any, model_class: Any, file: Path) -> Callable[[int], dict[str, Any]]:
    name, kind = model_class.main_input_name, model_class.__name__
    if not kind.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "Classification")):
        raise CaptureError(
            f"{file.name}: {kind} computes no loss from labels that planner knows how to make",
            hint="write a Python file with build_model(), example_inputs(batch_size) and loss_fn(output)",
        )
    if name == "pixel_values" and kind.endswith("ForImageClassification"):
        return lambda batch_size: _image_inputs(config, batch_size)
    if name == "input_ids" and not kind.endswith(("ForTokenClassification", "ForImageClassification")):
        per_row = kind.endswith("ForSequenceClassification")
        return lambda batch_size: _text_inputs(config, batch_size, per_row)
    raise CaptureError(
        f"{file.name}: {kind} takes {name!r}, which planner does not know how to make",
        hint="write a Python file with build_model() and example_inputs(batch_size) for this model",
    )


def _image_inputs(config: Any, batch_size: int) -> dict[str, Any]:
    import torch

    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {
        "pixel_values": torch.randn(batch_size, config.num_channels, height, width),
        "labels": torch.randint(0, config.num_labels, (batch_size,)),
    }


def _text_inputs(config: Any, batch_size: int, per_row: bool) -> dict[str, Any]:
    import torch

    text = config.get_text_config()
    length = min(getattr(text, "max_position_embeddings", None) or MAX_SEQUENCE, MAX_SEQUENCE)
    # the pad token is excluded: classification heads look for the last token that isn't padding
    ids = torch.randint(0, text.vocab_size, (batch_size, length))
    pad = getattr(config, "pad_token_id", None)
    if pad is not None:
        ids = torch.where(ids == pad, (pad + 1) % text.vocab_size, ids)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["labels"] = torch.randint(0, config.num_labels, (batch_size,)) if per_row else ids.clone()
    return inputs
