"""``pm.generate()``: the generation of transformers, whose loop calls programs of the ranks instead of the model.

model.generate(input_ids, ...)                         pm.generate(input_ids, ...)
  loop of transformers                                   the same loop
    model(input_ids, past_key_values, ...)                 Decoder.extend(...): one program a rank
    processors, sampling, stopping                         the same, on the same logits

So tokens are those of the model, and what ``model.generate`` takes besides is taken here, as far as it needs no more than logits.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.model.generation.cached_forward import cache_name, language_model
from partitioner.model.generation.decoder import Decoder, Decoding
from partitioner.specialize.trace import Trace
from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError, PartitionError

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Generation modes of transformers that need no more than the logits of the last token."""

_REFUSED: Mapping[str, str] = {
    "past_key_values": "the ranks keep their own cache",
    "cache": "the ranks keep their own cache",
    "inputs_embeds": "programs take tokens",
    "prompt_lookup_num_tokens": "the cache keeps accepted tokens only",
    "custom_generate": "it may call the model in other ways than with tokens and a cache",
    "synced_gpus": "all ranks run one loop already",
    "output_attentions": "programs return the logits alone",
    "output_hidden_states": "programs return the logits alone",
}
"""Argument of ``model.generate`` -> why it is not taken."""

_READ = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "cache"})
_IGNORED = frozenset({"cache_position", "logits_to_keep", "return_dict", "use_cache", *_REFUSED})


@dataclass(frozen=True)
class _Request:
    """A batch of prompts that are answered together.

    Attributes:
        ids: (batch, tokens).
        arguments: further ones of ``model.generate``.
        length: the most tokens that there will be, with those of the prompts.
    """

    ids: Tensor
    arguments: Mapping[str, Any]
    length: int


def generate(
    trace: Trace,
    decoders: list[Decoder],
    training: bool,
    input_ids: Tensor | None,
    kwargs: Mapping[str, Any],
) -> Any:
    """Generate tokens; see ``PartitionedModel.generate``.

    Args:
        decoders: the one decoder of the model, or none before the first call, which adds it.
        training: whether the model is in training mode.
        input_ids: (batch, tokens).
        kwargs: further arguments of ``model.generate``.
    """
    model: Any = trace.original
    if hasattr(model, "generate"):
        model = language_model(model)
    else:
        raise AttributeError(f"{trace.name} has no generate(): it is for causal language models of transformers")
    if training:
        raise ConfigError("generate() is for a model in evaluation mode", remedy="pm.eval()")
    limit = most_positions(model)
    given = input_ids if input_ids is not None else kwargs.get("inputs")
    request = _checked_request(trace, limit, given, {name: value for name, value in kwargs.items() if name != "inputs"})
    trace.runtime.agree("shape of the tokens to generate from", f"{tuple(request.ids.shape)} and up to {request.length} tokens")
    if not decoders:
        decoders.append(Decoder(trace, limit))
    cache = _cache_type()(decoders[0], request.length)
    with _naming_arguments():
        return _driver(model, request.ids.device).generate(request.ids, **{cache_name(): cache}, **request.arguments)


def _checked_request(trace: Trace, limit: int | None, ids: Any, given: dict[str, Any]) -> _Request:
    """Return a request that programs can answer; raise ConfigError for any other."""
    ids = _checked_ids(ids)
    rest = {name: value for name, value in given.items() if name != "cache_implementation"}
    config = _resolved_config(trace, rest, given)
    parts = trace.programs.rows.count
    if (config.num_beams or 1) > 1 and parts > 1:  # None in transformers 5, where nothing is said
        raise ConfigError(
            f"num_beams={config.num_beams} moves sequences between rows of the batch, which {parts} ranks hold",
            remedy="partition in a mode that does not cut the batch (tensor, pipeline), or leave num_beams out",
        )
    return _Request(ids, rest, _length(config, ids.shape[1], limit))


@contextlib.contextmanager
def _naming_arguments() -> Iterator[None]:
    """Raise a ConfigError for arguments that transformers refuses; its text names them."""
    try:
        yield
    except PartitionError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"transformers refuses the arguments of generate(): {error}", remedy="pass those of model.generate()") from error


def _checked_ids(input_ids: Any) -> Tensor:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype.is_floating_point or input_ids.numel() == 0:
        shown = (
            f"a tensor of shape {tuple(input_ids.shape)} and {input_ids.dtype}" if isinstance(input_ids, Tensor) else described(input_ids)
        )
        raise ConfigError(f"input_ids is {shown}", remedy="pass tokens as a tensor of integers, (batch, tokens), with at least one of each")
    return input_ids


def most_positions(model: Any) -> int | None:
    """Return the most positions that a causal model takes, by its config; None: any number.

    Raises:
        ConfigError: the model is no causal language model.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder with a decoder, and generate() is for models that are a decoder alone",
            remedy="model.generate() decodes on one device",
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _resolved_config(trace: Trace, rest: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the generation config of a call, after refusing what programs cannot do.

    Raises:
        ConfigError: names the argument.
    """
    model: Any = language_model(trace.original)
    given = rest.get("generation_config")
    config = copy.deepcopy(model.generation_config if given is None else given)
    with _naming_arguments():
        unused = config.update(**{name: value for name, value in rest.items() if name != "generation_config"})
    for name, reason in _REFUSED.items():
        if unused.get(name) or getattr(config, name, None):
            raise ConfigError(f"generate() does not take {name}: {reason}", remedy=f"leave {name} out")
    if models := [name for name, value in rest.items() if isinstance(value, nn.Module)]:
        raise ConfigError(f"generate() does not take {models[0]}: it is a second model", remedy="leave it out")
    if config.use_cache is False:
        raise ConfigError("use_cache=False would compute all tokens anew for each further one", remedy="leave it out")
    if kwargs.get("cache_implementation") not in (None, "static", "dynamic"):
        raise ConfigError(
            f"cache_implementation={kwargs['cache_implementation']!r}: the ranks keep a static cache of their own", remedy="leave it out"
        )
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in _MODES:
        raise ConfigError(f"generate() does not do {mode}", remedy=f"choose arguments of one of {', '.join(_MODES)}")
    is_alone = len(trace.runtime.local_ranks) == trace.runtime.n_ranks
    if config.do_sample and not is_alone:
        raise ConfigError(
            "do_sample=True draws in every process, and their random states may differ, so that each would go on with other tokens",
            remedy="do_sample=False, or all ranks in one process",
        )
    if trace.programs.rows.inputs == "local":
        raise ConfigError(
            'generate() takes the whole batch on every rank, and the model is partitioned with inputs="local"',
            remedy='partition(..., inputs="global")',
        )
    return config


def _length(config: Any, prompt: int, limit: int | None) -> int:
    """Return the most tokens of a sequence, prompt included; raise ConfigError if the request exceeds the model's positions."""
    new = config.max_new_tokens
    if new is not None and (not isinstance(new, int) or new < 1):
        raise ConfigError(f"max_new_tokens={new!r} is no number of tokens", remedy="pass at least 1")
    total = prompt + new if new is not None else max(config.max_length or 0, prompt + 1)
    if limit is not None and total > limit and (new is not None or prompt >= limit):
        raise _full(prompt, total, limit)
    return total if limit is None else min(total, limit)


def _full(prompt: int, total: int, limit: int) -> ConfigError:
    return ConfigError(
        f"the cache would be full: {prompt} tokens and {total - prompt} new ones are {total}, and the model has {limit} positions",
        remedy=f"max_new_tokens={limit - prompt} is the most for this prompt" if limit > prompt else "shorten the prompt",
    )


def _driver(model: Any, on: torch.device) -> Any:
    """Return an object that generates like a model of transformers, for tokens on a device, but calls the programs of its cache."""
    base = type(model)

    def forward(
        _: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **others: Any
    ) -> Any:
        cache = others[cache_name()]
        given = sorted(name for name, value in others.items() if name not in _READ | _IGNORED and value is not None)
        if given:
            raise ConfigError(f"generate() does not take {', '.join(given)}: programs read tokens alone", remedy=f"leave {given[0]} out")
        return cache.extended(input_ids, attention_mask, position_ids)

    # transformers reads from the signature what it may pass
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    driver = copy.copy(model)
    driver.__dict__.pop("forward", None)
    members = {"forward": forward, "device": on, "__module__": base.__module__}
    driver.__class__ = type(base.__name__, (base,), members)
    return driver


def _cache_type() -> Any:
    """Return a cache class of transformers that stands for the parts that ranks keep."""
    base: Any = importlib.import_module("transformers.cache_utils").Cache
    output: Any = importlib.import_module("transformers.modeling_outputs").CausalLMOutputWithPast

    class RankCache(base):  # type: ignore[misc]
        """The cache of one call of ``generate``."""

        is_compileable = False  # transformers then passes masks of (batch, tokens)

        def __init__(self, decoder: Decoder, length: int) -> None:
            super().__init__(layers=[])
            self._decoder, self._decoding = decoder, decoder.begin(length)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self._decoding.used

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._decoder.reorder(self._decoding, beam_idx)

        def extended(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Any:
            """Return the output of the model for further tokens."""
            decoding: Decoding = self._decoding
            end, limit = decoding.used + input_ids.shape[1], self._decoder.limit
            if limit is not None and end > limit:
                raise _full(decoding.used, end, limit)
            if attention_mask is None:
                attention_mask = input_ids.new_ones(input_ids.shape[0], end)
            if position_ids is None:
                position_ids = torch.arange(decoding.used, end, device=input_ids.device).expand_as(input_ids)
            # transformers numbers the positions of all rows at once where it prefills in chunks
            positions = position_ids.expand_as(input_ids)
            logits = self._decoder.extend(decoding, input_ids, attention_mask.long(), positions)
            return output(logits=logits, **{cache_name(): self})

    return RankCache
