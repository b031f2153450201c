"""Read parts of tensors from safetensors files, in pieces, so that no process reads or holds more than its part.

folder    model.safetensors.index.json     {"weight_map": {"embed.weight": "model-00001-of-00004.safetensors", ...}}
          model-00001-of-00004.safetensors ...
block     rows or columns of a tensor, or several of them (heads of a fused projection): each is read in pieces, which are converted
          to the dtype of the parameter where they are copied into it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from partitioner.runtime.state.sharded_tensor import block_chunks
from passes.ir.errors import ConfigError, first_few
from passes.spmd.shards import Block

_PIECE = 8 * 2**20
"""Bytes of a tensor that are read at once."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The names of transformers; a folder may have others."""


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor in a file: its slices are read by index."""

    path: Path
    slices: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFiles:
    """The tensors of a file, or of all files of an index. A context, in which the files are open.

    Args:
        path: of a file, of an index, or of the folder of either.

    Raises:
        ConfigError: there are no such files, a file is damaged, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._tensors = _saved_tensors(path, opened)
            self._open = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def like(self, name: str) -> Tensor:
        """Return a tensor on the meta device with the shape and dtype of a saved one."""
        saved = self._tensors[name]
        return torch.empty(saved.shape, dtype=saved.dtype, device="meta")

    def read(self, name: str, block: Block, part: Tensor) -> None:
        """Copy a block of a saved tensor into ``part``, which has its shape and any dtype and device.

        Raises:
            ConfigError: the file cannot be read.
        """
        saved = self._tensors[name]
        with _errors_of(saved.path, name):
            for offsets, own in block_chunks(block):
                lengths = [each.stop - each.start for each in own]
                for piece in _pieces(lengths, max(1, _PIECE // saved.dtype.itemsize)):
                    source = tuple(slice(start + each.start, start + each.stop) for start, each in zip(offsets, piece, strict=True))
                    target = tuple(slice(whole.start + each.start, whole.start + each.stop) for whole, each in zip(own, piece, strict=True))
                    part[target].copy_(saved.slices[source] if source else saved.slices[...])


def _pieces(lengths: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of an array that cover it, each of at most so many elements."""
    if math.prod(lengths) <= most:
        yield tuple(slice(0, length) for length in lengths)
        return
    first, *others = lengths
    step = max(1, most // math.prod(others))
    for start in range(0, first, step):
        for rest in _pieces(others, most):
            yield (slice(start, min(start + step, first)), *rest)


# -- finding and opening files -------------------------------------------------------------------------------------------------------


def _saved_tensors(path: Path, opened: contextlib.ExitStack) -> dict[str, _SavedTensor]:
    """Return the tensors by name; their files are opened in ``opened``."""
    files = _files(path)
    if isinstance(files, Path):
        return _tensors_of(files, opened)
    tensors: dict[str, _SavedTensor] = {}
    for file in dict.fromkeys(files.values()):
        tensors.update({name: tensor for name, tensor in _tensors_of(file, opened).items() if files.get(name) == file})
    absent = [f"{name} in {file.name}" for name, file in files.items() if name not in tensors]
    if absent:
        raise ConfigError(f"the index of {path} names tensors that its files lack: {first_few(absent)}", remedy="download the files again")
    return tensors


def _files(path: Path) -> Path | dict[str, Path]:
    """Return the one file of all tensors, or name of a tensor -> its file."""
    if not path.exists():
        raise ConfigError(f"there is no {path}", remedy="pass a safetensors file, or a folder with one or with an index of several")
    if path.is_file():
        return _files_of_index(path) if path.suffix == ".json" else path
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    for found, usual in ((indices, _INDEX), (files, _SINGLE)):
        chosen = found if len(found) == 1 else [each for each in found if each.name == usual]
        if chosen:
            return _files_of_index(chosen[0]) if found is indices else chosen[0]
        if found:
            raise ConfigError(f"{path} has {first_few([each.name for each in found])}", remedy="pass the path of one of them")
    others = sorted(each.name for each in path.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    beside = f", only {first_few(others)}" if others else ""
    raise ConfigError(
        f"{path} has no safetensors file{beside}",
        remedy="save one: model.save_pretrained(folder), or safetensors.torch.save_file(state_dict, path)",
    )


def _files_of_index(index: Path) -> dict[str, Path]:
    """Return name of a tensor -> its file, as an index has them."""
    remedy = 'an index is {"weight_map": {name of a tensor: name of a file}}'
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{index} cannot be read: {error}", remedy=remedy) from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} has no table of tensors", remedy=remedy)
    absent = [name for name in dict.fromkeys(names.values()) if not (index.parent / name).is_file()]
    if absent:
        raise ConfigError(f"{index} names files that are not there: {first_few(absent)}", remedy="download all files of the checkpoint")
    return {name: index.parent / file for name, file in names.items()}


def _tensors_of(path: Path, opened: contextlib.ExitStack) -> dict[str, _SavedTensor]:
    """Open a file; return its tensors by name. Only its header is read."""
    try:
        safetensors = importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        raise ConfigError("the package safetensors is not installed", remedy="pip install 'torch-partitioner[safetensors]'") from error
    with _errors_of(path):
        file = opened.enter_context(safetensors.safe_open(path, framework="pt"))
        return {name: _saved(path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118  it has no other way


def _saved(path: Path, slices: Any) -> _SavedTensor:
    shape = tuple(slices.get_shape())
    return _SavedTensor(path, slices, shape, (slices[0:0] if shape else slices[...]).dtype)


@contextlib.contextmanager
def _errors_of(path: Path, name: str = "") -> Iterator[None]:
    """Raise ConfigError for errors of the library, with the path of the file."""
    safetensors = importlib.import_module("safetensors")
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        what = f"{name} of {path}" if name else str(path)
        raise ConfigError(f"{what} cannot be read: {error}", remedy="download or save the file again") from error
