"""Each rank reads its slices of safetensors files: values, memory, names and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel, partition
from partitioner.runtime.state.checkpoint import safetensors_files
from tests.partitioner.runtime.state.checkpoint import safetensors_cases as cases
from tests.partitioner.runtime.state.checkpoint.safetensors_cases import PROMPT, Rotated, saved_in_parts
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


def on_meta(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()


def rotated() -> Rotated:
    torch.manual_seed(0)
    model = Rotated()
    model.norm.running_mean.fill_(0.25)  # type: ignore[union-attr]
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def planned(model: nn.Module, mode: Any = "tensor", **options: Any) -> PartitionedModel:
    return partition(model, 2, mode, example_inputs=(X,), progress=False, **options)


@pytest.mark.parametrize("mode", ["tensor", *slow("fsdp", "pipeline", "data")])
def test_a_model_from_the_meta_device_computes_and_trains(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in pieces of a few numbers; heads of the fused projection are strided."""
    monkeypatch.setattr(safetensors_files, "_PIECE", 96)
    reference = rotated()
    pm = planned(on_meta(Rotated), mode, training=True)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.load_safetensors(saved(reference, tmp_path))
    of_reference = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        expected, found = reference(X), pm(X)
        torch.testing.assert_close(found, expected)
        for result, each in ((expected, of_reference), (found, optimizer)):
            result.square().mean().backward()
            each.step()
            each.zero_grad()
    for name, tensor in pm.full_state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], msg=name)


def test_values_are_converted(tmp_path: Path) -> None:
    reference = perceptron().bfloat16()
    path = saved(reference, tmp_path)
    pm = planned(on_meta(perceptron))
    assert str(pm.load_safetensors(path)) == "<All keys matched successfully>"
    for name, tensor in pm.full_state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name].float()), name


def test_a_model_with_values_is_filled_in_place(tmp_path: Path) -> None:
    reference = perceptron()
    pm = planned(perceptron(), "fsdp")
    parameters = list(pm.parameters())
    pm.load_safetensors(str(saved(reference, tmp_path)))
    assert all(one is other for one, other in zip(parameters, pm.parameters(), strict=True))
    assert torch.equal(pm(X), reference(X))


@pytest.mark.slow
def test_tied_weights_need_one_name_and_an_index_names_files(tmp_path: Path) -> None:
    reference = saved_in_parts(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    pm = partition(on_meta(cases.llama), 2, "pipeline", example_inputs=(PROMPT,), progress=False)
    result = pm.load_safetensors(tmp_path)
    assert not result.missing_keys
    assert not result.unexpected_keys
    expected = reference.generate(PROMPT, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(pm.generate(PROMPT, max_new_tokens=5, do_sample=False, pad_token_id=0), expected)
    torch.testing.assert_close(pm(PROMPT).logits, reference(PROMPT).logits)


def test_names_that_differ(tmp_path: Path) -> None:
    state = perceptron().state_dict()
    path = tmp_path / "other.safetensors"
    save_file({"0.weight": state["0.weight"], "3.weight": state["2.weight"]}, path)
    pm = planned(perceptron())
    before = pm.full_state_dict()
    with pytest.raises(ConfigError, match=r"the files lack 0.bias, 2.weight, 2.bias; the model has no 3.weight"):
        pm.load_safetensors(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pm.full_state_dict().items())
    result = pm.load_safetensors(tmp_path, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias", "2.weight", "2.bias"], ["3.weight"])
    assert torch.equal(pm.full_state_dict()["0.weight"], state["0.weight"])


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result


def test_a_prefix_is_named_and_a_part_loads_its_own_file(tmp_path: Path) -> None:
    reference = perceptron()
    path = saved(reference, tmp_path)
    pm = planned(on_meta(Wrapped))
    with pytest.raises(ConfigError, match=r'lack "model\."(.|\n)*remedy: .*pm\.model\.load_safetensors\(path\)'):
        pm.load_safetensors(path)
    pm.model.load_safetensors(path)
    torch.testing.assert_close(pm(X), reference(X))
    saved(Wrapped(), tmp_path)
    with pytest.raises(ConfigError, match=r'begin with "model\."'):
        planned(perceptron()).load_safetensors(path)


def test_shapes_and_dtypes_are_checked_before_any_is_copied(tmp_path: Path) -> None:
    state = perceptron().state_dict()
    pm = planned(perceptron(), "pipeline")
    before = pm.full_state_dict()
    for name, value, problem in (
        ("2.bias", torch.zeros(17), r"2.bias has shape \(17,\) in the files and \(16,\) in the model"),
        ("2.bias", torch.zeros(16, dtype=torch.complex64), r"2.bias has dtype torch.complex64 in the files"),
    ):
        save_file({**state, name: value}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=problem):
            pm.load_safetensors(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pm.full_state_dict().items())


def damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"abc", b"\x10" + bytes(7) + b"{", b"\xff" * 64], ids=["empty", "short", "cut", "noise"])
def test_damaged_files_are_named(content: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path / "model.safetensors", content)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        planned(perceptron()).load_safetensors(path)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = saved(perceptron(), tmp_path)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        planned(perceptron()).load_safetensors(damaged(path, path.read_bytes()[:-3]))


def test_folders_without_files(tmp_path: Path) -> None:
    pm = planned(perceptron())
    with pytest.raises(ConfigError, match=r"there is no .*nowhere"):
        pm.load_safetensors(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has no safetensors file, only pytorch_model.bin"):
        pm.load_safetensors(tmp_path)
    state = perceptron().state_dict()
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"has a.safetensors, b.safetensors(.|\n)*pass the path of one"):
        pm.load_safetensors(tmp_path)
    pm.load_safetensors(tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match="path"):
        pm.load_safetensors(3)  # type: ignore[arg-type]


def test_indices(tmp_path: Path) -> None:
    pm, state = planned(perceptron()), perceptron().state_dict()
    index = tmp_path / "model.safetensors.index.json"
    for text, problem in (
        ("{", "cannot be read"),
        ("[]", "has no table of tensors"),
        (json.dumps({"weight_map": {"0.bias": "x.safetensors"}}), "files that are not there: x.safetensors"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            pm.load_safetensors(tmp_path)
    save_file({name: state[name] for name in ("0.weight", "0.bias")}, tmp_path / "one.safetensors")
    save_file(state, tmp_path / "two.safetensors")
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(state, "two.safetensors"), "0.bias": "one.safetensors"}}))
    pm.load_safetensors(index)
    assert all(torch.equal(tensor, load_file(tmp_path / "two.safetensors")[name]) for name, tensor in pm.full_state_dict().items())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "one.safetensors")}))
    with pytest.raises(ConfigError, match=r"names tensors that its files lack: 2.weight in one.safetensors"):
        pm.load_safetensors(tmp_path)


def test_pieces_cover_a_tensor() -> None:
    for lengths in ([], [5], [1, 7], [3, 1, 9], [2, 5, 4], [0, 4]):
        for most in (1, 2, 3, 6, 100):
            counts = torch.zeros(lengths)
            for piece in safetensors_files._pieces(lengths, most):
                assert counts[piece].numel() <= most
                counts[piece] += 1
            assert torch.equal(counts, torch.ones(lengths))


@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "pipeline", "fsdp"])
def test_ranks_hold_their_part(mode: str, tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    """From meta to tokens on four ranks, each with less than a small tensor of the model beside its part."""
    reference = saved_in_parts(tmp_path)
    tokens = reference.generate(PROMPT, max_new_tokens=6, do_sample=False, pad_token_id=0)
    largest = max(parameter.nbytes for parameter in reference.parameters())
    for found, beside in workers(4).values(cases.loaded, mode, 4, str(tmp_path), timeout=350):
        assert found == tokens.tolist()
        assert beside < largest


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_that_see_other_files(tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.unlike_files, str(tmp_path)):
        assert isinstance(answer.error, ConfigError)
        assert "the safetensors files" in str(answer.error)
