"""Build a model of transformers from a JSON configuration, on the meta device: no weights, no code of the configuration's repository."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.text_files import read_text
from passes.ir.arguments.checked import at_least, checked_arguments
from passes.ir.errors import ConfigError

_BATCH = 8
_SEQUENCE = 2048
_CONFIG = "config.json"
_REFUSALS = (TypeError, ValueError, KeyError, AttributeError)
"""Errors of transformers for entries that do not fit together."""


@checked_arguments({"batch": at_least(1), "sequence": at_least(1)}, {"batch": "8", "sequence": "2048"})
def transformers_model(path: str, batch: int = _BATCH, sequence: int | None = None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model of a configuration in training mode, on the meta device, with its inputs.

    Its class is the first of the configuration's ``architectures`` that transformers has, else the causal language model of its
    ``model_type``. Parameters are float32, as in mixed precision; ``precision="bf16-true"`` converts them. Language models get labels.

    Args:
        path: the JSON file, or a folder with a ``config.json``.
        batch: samples of the whole batch.
        sequence: tokens of each sample; None: 2,048, or the model's longest sequence if that is shorter.

    Raises:
        ConfigError: transformers is not installed, the file is no configuration of it, or the model takes other inputs than tokens and
            images.
    """
    transformers = _transformers(path)
    config = _config(transformers, path)
    kind = _class(transformers, config, path)
    try:
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except (*_REFUSALS, RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"{kind.__name__} refuses the configuration {path}: {error}", remedy="correct its entries") from error
    return model.train(), (), _inputs(model, config, path, batch, sequence)


def _transformers(path: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"transformers:{path} needs transformers, which is not installed", remedy="pip install 'torch-partitioner[transformers]'"
        ) from error


def _config(transformers: Any, path: str) -> Any:
    """Read the configuration, by the class that transformers has for its ``model_type``."""
    file = Path(path) / _CONFIG if Path(path).is_dir() else Path(path)
    text = read_text(file, "the configuration", "name a JSON file of transformers, as a model's config.json")
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration {file} is not JSON: {error}", remedy="name a model's config.json") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"the configuration {file} names no model_type", remedy="name a model's config.json, which names one")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {transformers.__version__} has no model_type {kind!r}",
            remedy="use a version that has it, or a factory, net.py:factory, for a model with code of its own",
        )
    strict = importlib.import_module("huggingface_hub.errors").StrictDataclassError  # of an entry of another type
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(fields)
    except (*_REFUSALS, strict) as error:
        raise ConfigError(f"transformers refuses the configuration {file}: {error}", remedy="correct its entries") from error
    config.use_cache = False  # of decoding: a step of training has none
    return config


def _class(transformers: Any, config: Any, path: str) -> Any:
    """Return the class of the model."""
    for name in config.architectures or ():
        if isinstance(kind := getattr(transformers, name, None), type):
            return kind
    if config.architectures:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {', '.join(config.architectures)}, the architecture of {path}",
            remedy="name one that it has, as LlamaForCausalLM, or use a factory for a model with code of its own",
        )
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConfigError(f"the configuration {path} names no architecture", remedy='add "architectures": ["LlamaForCausalLM"] or the like')


def _inputs(model: nn.Module, config: Any, path: str, batch: int, sequence: int | None) -> dict[str, Any]:
    """Return the keyword inputs of a step: tokens with labels, images, or both."""
    taken = inspect.signature(model.forward).parameters
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    inputs: dict[str, Any] = {}
    if "input_ids" in taken and getattr(text, "vocab_size", None):
        longest = getattr(text, "max_position_embeddings", None) or _SEQUENCE
        tokens = _tokens(batch, sequence or min(_SEQUENCE, longest))
        inputs["input_ids"] = tokens
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens
        if "labels" in taken and type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM")):
            inputs["labels"] = tokens
    side = getattr(vision, "image_size", None)
    if "pixel_values" in taken and side:
        height, width = (side, side) if isinstance(side, int) else side
        inputs["pixel_values"] = torch.zeros(batch, getattr(vision, "num_channels", 3), height, width, device="meta")
    main = getattr(model, "main_input_name", "input_ids")
    if main not in inputs:
        raise ConfigError(
            f"{type(model).__name__} of {path} takes {main}, which a configuration does not give", remedy="write a factory: net.py:factory"
        )
    if sequence is not None and "input_ids" not in inputs:
        raise ConfigError(f"{type(model).__name__} of {path} takes no tokens, and so no sequence", remedy="leave out --sequence")
    return inputs


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long, device="meta")
