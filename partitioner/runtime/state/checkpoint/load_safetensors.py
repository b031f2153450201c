"""Load safetensors files with original names: each process reads the blocks of its ranks, and no tensor as a whole.

file       names, shapes and dtypes of all tensors are checked on every rank before any is read
tied       one name of a tied parameter is enough (``lm_head.weight`` of transformers is in no file)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.checkpoint.load_state import check_entry
from partitioner.runtime.state.checkpoint.safetensors_files import SafetensorsFiles
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError, first_few


def load_safetensors(state: State, runtime: Runtime, path: Path, *, strict: bool, prefix: str = "") -> Any:
    """Copy tensors from safetensors files into the shards and copies of this process. Every rank must call it.

    Args:
        state: of this process.
        runtime: of it.
        path: of a file, of an index, or of the folder of either.
        strict: whether the files must have everything that the model has, and nothing else.
        prefix: what the names of the module to load begin with, which the names in the files do not.

    Returns:
        What ``nn.Module.load_state_dict`` returns: ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ConfigError: on every rank: files are missing or damaged; a name is unknown or missing, or a tensor is of another shape or kind
            of dtype. Nothing is loaded then.
    """
    state.check_names()
    names = [name for name in state.names if name.startswith(prefix)]
    with contextlib.ExitStack() as stack:
        try:
            files = stack.enter_context(SafetensorsFiles(path))
            saved = {f"{prefix}{name}": name for name in files.names}
            result = _compared(state, names, saved.keys(), strict=strict, prefix=prefix)
            for name in (name for name in names if name in saved):
                check_entry(name, files.like(saved[name]), state.like(name).shape, state.like(name), source="files")
        except ConfigError as error:
            runtime.agree("the safetensors files", error.problem)
            raise
        runtime.agree("the safetensors files", _digest(files))
        last = {state.first_name(name): name for name in names if name in saved}  # as copying all of them in order would leave it
        for name in last.values():
            state.fill(name, lambda block, part, name=saved[name]: files.read(name, block, part))  # type: ignore[misc]
    state.complete()
    return result


def _compared(state: State, names: Sequence[str], saved: Collection[str], *, strict: bool, prefix: str) -> Any:
    """Return missing and unexpected names, without ``prefix``; raise ConfigError if there are some and ``strict``, or shapes differ."""
    given = {state.first_name(name) for name in names if name in saved}
    missing = [name.removeprefix(prefix) for name in names if state.first_name(name) not in given]
    known = frozenset(names)
    unexpected = [name.removeprefix(prefix) for name in saved if name not in known]
    if strict and (missing or unexpected):
        problems = [f"the files lack {first_few(missing, 5)}"] if missing else []
        problems += [f"the model has no {first_few(unexpected, 5)}"] if unexpected else []
        of_prefix = _differing_prefix(missing, unexpected)
        usual = "pass the files of this model; strict=False keeps values that are missing and skips unknown names"
        raise ConfigError("; ".join([*problems, *of_prefix[:1]]), remedy=of_prefix[1] if of_prefix else usual)
    result: Any = nn.Module().load_state_dict({})  # torch does not export the class
    return type(result)(missing, unexpected)


def _differing_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str] | tuple[()]:
    """Return a problem and its remedy if names of the model and of the files differ by a prefix."""
    for shorter, longer, of_files in ((missing, unexpected, True), (unexpected, missing, False)):
        wanted, candidates = frozenset(shorter), frozenset(longer)
        for name in longer:
            prefixes = (name[: index + 1] for index, letter in enumerate(name) if letter == ".")
            found = next((prefix for prefix in prefixes if name.removeprefix(prefix) in wanted), None)
            if found is not None and all(f"{found}{each}" in candidates for each in wanted):
                path = found.rstrip(".")
                if of_files:
                    return (
                        f'names in the files begin with "{found}", which names of this model do not: they are of a larger model',
                        f"partition the larger model; or save its part: safetensors.torch.save_file(larger.{path}.state_dict(), path)",
                    )
                return f'names in the files lack "{found}"', f"load them into that part: pm.{path}.load_safetensors(path)"
    return ()


def _digest(files: SafetensorsFiles) -> str:
    """Return a digest of the names, shapes and dtypes of all tensors, for comparison between ranks."""
    likes = [(name, files.like(name)) for name in sorted(files.names)]
    text = repr([(name, tuple(like.shape), like.dtype) for name, like in likes])
    return f"{len(likes)} tensors ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
