"""How long ``partition()`` takes: seconds of a processor after imports, for models of transformers, diffusers, timm and torch, by mode.

    python -m benchmarks.latency                                  # every model in every mode, on 4 devices; minutes
    python -m benchmarks.latency --models U-Net --modes auto      # one line, for a quick look
    python -m benchmarks.latency --reports                        # and the programs of a step, pm.graphs, explain() and save_report()

Each line is a process of its own that builds the model on the meta device, partitions a linear layer, since PyTorch imports much when it
exports for the first time, and then partitions the model for training once in each mode. Seconds are those of the processor, so that other
work on the machine counts little; "export" is torch.export alone, of the same call and with no size open, by which machines compare. A
dash: the mode does not fit the model, and the seconds of its refusal count too. A mode writes its programs, with their backward, when they
are first asked for: "programs" is that, and the simulation of a step; the reports after it read them. Last come a model of 2,000 layers,
and 4,000 devices for one of three, which are refused.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partitioner import PartitionedModel, PartitionError, partition

DEVICES = 4
MODES = ("model", "pipeline", "data", "fsdp", "tensor", "sequence", "tile", "auto")
REPORTS: Mapping[str, Callable[[PartitionedModel], object]] = {
    "programs": lambda pm: pm.simulate(),
    "graphs": lambda pm: pm.graphs,
    "explain": lambda pm: pm.explain(),
    "report": lambda pm: pm.save_report(f"{tempfile.mkdtemp()}/report.html"),
}

Call = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
"""A model, and the positional and keyword inputs of one call."""


@dataclass(frozen=True)
class Latency:
    """One model in one mode.

    Attributes:
        mode: of ``partition()``; ``"export"``: of ``torch.export`` alone.
        partition: s of the processor.
        reports: s of the processor, for each of ``REPORTS`` that was asked for.
        refusal: the error, where the mode does not fit the model.
    """

    mode: str
    partition: float
    reports: Mapping[str, float]
    refusal: str = ""


def _tokens(rows: int = 8, length: int = 128) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def _image(side: int, rows: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.zeros(rows, channels, side, side)


def _transformers(kind: str, config: str, *inputs: torch.Tensor, **sizes: Any) -> Call:
    """Return a model of transformers from its configuration, with its default number of layers."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)), inputs, {}


def _diffusers(kind: str, inputs: tuple[Any, ...], **sizes: Any) -> Call:
    return getattr(importlib.import_module("diffusers"), kind)(**sizes), inputs, {}


def _timm(kind: str) -> Call:
    return importlib.import_module("timm").create_model(kind), (_image(224),), {}


def _conditioned_unet() -> Call:
    """Return a U-Net of a diffusion model with text as its condition."""
    sizes = {"sample_size": 32, "in_channels": 4, "out_channels": 4, "layers_per_block": 2, "block_out_channels": (32, 64)}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    inputs = _image(32, channels=4), torch.zeros(8, dtype=torch.long), torch.zeros(8, 16, 32)
    return _diffusers("UNet2DConditionModel", inputs, **sizes, **blocks, cross_attention_dim=32, attention_head_dim=8)


def _torch_transformer() -> Call:
    return nn.Transformer(512, 8, batch_first=True), (torch.zeros(8, 64, 512), torch.zeros(8, 64, 512)), {}


class _Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layers, self.head = nn.Embedding(4000, 256), nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 4000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        logits: torch.Tensor = self.head(self.layers(self.token(tokens))[0])
        return logits


def _perceptron() -> Call:
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), (torch.zeros(64, 1024),), {}


def _encoder() -> Call:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 12), (torch.zeros(8, 64, 512),), {}


_T5 = (_tokens(), torch.ones(8, 128, dtype=torch.long), _tokens(8, 32))

MODELS: Mapping[str, Callable[[], Call]] = {
    "GPT-2": lambda: _transformers("GPT2LMHeadModel", "GPT2Config", _tokens(), use_cache=False),
    "OPT": lambda: _transformers("OPTForCausalLM", "OPTConfig", _tokens(), use_cache=False),
    "Llama, 4 layers": lambda: _transformers("LlamaForCausalLM", "LlamaConfig", _tokens(), num_hidden_layers=4, use_cache=False),
    "Llama, 32 layers": lambda: _transformers("LlamaForCausalLM", "LlamaConfig", _tokens(), use_cache=False),
    "Qwen3": lambda: _transformers("Qwen3ForCausalLM", "Qwen3Config", _tokens(), use_cache=False),
    "Gemma": lambda: _transformers("GemmaForCausalLM", "GemmaConfig", _tokens(), use_cache=False),
    "BERT": lambda: _transformers("BertForMaskedLM", "BertConfig", _tokens()),
    "T5": lambda: _transformers("T5ForConditionalGeneration", "T5Config", *_T5, use_cache=False, decoder_start_token_id=0),
    "ViT": lambda: _transformers("ViTForImageClassification", "ViTConfig", _image(224)),
    "Swin": lambda: _transformers("SwinForImageClassification", "SwinConfig", _image(224)),
    "ConvNeXt": lambda: _transformers("ConvNextForImageClassification", "ConvNextConfig", _image(224)),
    "U-Net": lambda: _diffusers("UNet2DModel", (_image(32), torch.zeros(8, dtype=torch.long)), sample_size=32),
    "U-Net with text": _conditioned_unet,
    "autoencoder": lambda: _diffusers("AutoencoderKL", (_image(64),)),
    "ResNet-50": lambda: _timm("resnet50"),
    "EfficientNet-B0": lambda: _timm("efficientnet_b0"),
    "MLP-Mixer": lambda: _timm("mixer_b16_224"),
    "nn.Transformer": _torch_transformer,
    "encoder": _encoder,
    "LSTM": lambda: (_Recurrent(), (_tokens(16, 32),), {}),
    "perceptron": _perceptron,
}
"""Name -> a model and a call of it, to be built within ``torch.device("meta")``."""

_LIBRARIES = {"ResNet-50": "timm", "EfficientNet-B0": "timm", "MLP-Mixer": "timm"}
"""Requirements of a model besides those of the tests."""


def latencies(name: str, modes: Sequence[str], with_reports: bool) -> list[Latency]:
    """Export one model, and partition it in each mode, in this process."""
    warnings.simplefilter("ignore")
    partition(nn.Linear(1, 1), 1, example_inputs=(torch.zeros(2, 1),), progress=False)
    with torch.device("meta"):
        model, args, kwargs = MODELS[name]()
    return [_export(model, args, kwargs), *(_latency(model, args, kwargs, mode, with_reports) for mode in modes)]


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Latency:
    start, refusal = time.process_time(), ""
    try:
        torch.export.export(model, args, dict(kwargs), strict=False)
    except Exception as error:  # noqa: BLE001  whatever PyTorch cannot export
        refusal = str(error).splitlines()[0]
    return Latency("export", time.process_time() - start, {}, refusal)


def _latency(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str, with_reports: bool) -> Latency:
    gc.collect()  # what the mode before has left is not this one's
    start, made, refusal = time.process_time(), None, ""
    try:
        made = partition(model, DEVICES, mode, example_inputs=args, example_kwargs=kwargs, training=True, progress=False)
    except PartitionError as error:
        refusal = str(error).splitlines()[0]
    seconds, reports = time.process_time() - start, {}
    if made is not None and with_reports:
        for name, read in REPORTS.items():
            start = time.process_time()
            read(made)
            reports[name] = time.process_time() - start
    return Latency(mode, seconds, reports, refusal)


def _extremes() -> None:
    """Print the seconds for many layers and for many devices."""
    with torch.device("meta"):
        deep = nn.Sequential(*(layer for _ in range(1000) for layer in (nn.Linear(64, 64), nn.ReLU())))
        shallow, rows = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.zeros(8, 64)
    for title, model, devices in (("2,000 layers", deep, DEVICES), ("4,000 devices", shallow, 4000)):
        for mode in ("pipeline", "tensor", "auto"):
            start, outcome = time.process_time(), "partitioned"
            try:
                partition(model, devices, mode, example_inputs=(rows,), training=True, progress=False)
            except PartitionError as error:
                outcome = f"refused: {str(error).splitlines()[0]}"
            print(f"{title:14} {mode:8} {time.process_time() - start:6.2f} s  {outcome}", flush=True)


def _text(found: Latency) -> str:
    mark = "-" if found.refusal else " "
    return "".join((f"{found.partition:8.2f}{mark}", *(f"{seconds:8.2f} " for seconds in found.reports.values())))


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):8.2f} " if seconds else f"{'-':>8} "


def main() -> None:
    """Print a table: a model a line, a mode a column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--reports", action="store_true", help="measure programs, pm.graphs, explain() and save_report() too")
    options = parser.parse_args()
    columns = ("", *REPORTS) if options.reports else ("",)
    headings = ["export", *(column or mode for mode in options.modes for column in columns)]
    print(f"{'s of a processor':18}" + "".join(f"{heading:>8} " for heading in headings), flush=True)
    spawn, every = multiprocessing.get_context("spawn"), list[Latency]()
    for name in options.models:
        library = _LIBRARIES.get(name)
        if library is not None and importlib.util.find_spec(library) is None:
            print(f"{name:18}  needs {library}", flush=True)
            continue
        with spawn.Pool(1) as pool:
            found = pool.apply(latencies, (name, options.modes, options.reports))
        every += [each for each in found if not each.refusal]
        print(f"{name:18}" + "".join(map(_text, found)), flush=True)
    blank = " " * 9 * (len(columns) - 1)
    by_mode = {mode: [each.partition for each in every if each.mode == mode] for mode in ("export", *options.modes)}
    print(f"{'median':18}" + "".join(_median(seconds) + ("" if mode == "export" else blank) for mode, seconds in by_mode.items()) + "\n")
    if set(options.models) == set(MODELS):
        warnings.simplefilter("ignore")
        _extremes()


if __name__ == "__main__":
    main()
