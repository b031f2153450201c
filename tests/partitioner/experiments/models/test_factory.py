"""Models by a text: factories of files and modules, with arguments, and configurations of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner.experiments.models.factory import call_factory, relative_to, source_name
from passes.ir.errors import ConfigError

NET = """
import torch
from torch import nn

def factory(depth=2, *, widths=(8,), bias=True):
    return nn.Sequential(*(nn.Linear(widths[0], 8, bias=bias) for _ in range(depth))), (torch.zeros(4, 8),)

def strict(depth, /):
    return factory(depth)
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "models.py").write_text(NET)
    (tmp_path / "shop" / "broken.py").write_text("import nowhere_at_all\n")
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [each for each in sys.modules if each.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "layers", "bias"),
    [
        ("net.py:factory", 2, True),
        ("net.py:factory()", 2, True),
        ("net.py:factory(depth=3, bias=False)", 3, False),
        ("net.py:factory(4, widths=[8, 9])", 4, True),
        ("net.py:strict(1)", 1, True),
        ("shop.models:factory", 2, True),
        ("shop.models:factory(depth=5)", 5, True),
    ],
)
def test_factories(text: str, layers: int, bias: bool) -> None:
    made = call_factory(text)
    model: Any = made.model
    assert (len(model), model[0].bias is not None) == (layers, bias)


def test_a_folder_with_parentheses(folder: Path) -> None:
    (folder / "copy(1)").mkdir()
    (folder / "copy(1)" / "net.py").write_text(NET)
    model: Any = call_factory("copy(1)/net.py:factory(depth=3)").model
    assert len(model) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("net.py:factory(depth=n)", "n in net.py:factory(depth=n) is no literal"),
        ("net.py:factory(depth=__import__('os').getpid())", "is no literal"),
        ("net.py:factory(**{})", "has ** among its arguments"),
        ("net.py:factory(depth=)", "cannot be read"),
        ("net.py:factory(dept=3)", "unexpected keyword argument 'dept'\n  remedy: did you mean depth?"),
        ("net.py:strict", "missing a required"),
        ("net.py:strict(depth=1)", "depth"),
        ("shop.moddels:factory", "there is no module shop.moddels"),
        ("nowhere:factory", "there is no module nowhere"),
        ("shop.broken:factory", "shop.broken failed: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("shop.models:factry", "shop.models has no 'factry'\n  remedy: its functions are factory, strict"),
        ("transformers:nowhere.json", "the configuration nowhere.json cannot be read"),
        ("transformers:llama.json(bach=2)", "did you mean batch? its arguments are batch, sequence"),
        ("transformers:llama.json(batch=0)", "batch must be 1 or more"),
        ("transformers:llama.json(sequence='long')", "sequence must be "),
    ],
)
def test_texts_that_name_no_model(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call_factory(text)
    assert problem in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_an_argument_is_given_once() -> None:
    with pytest.raises(ConfigError, match="both give depth"):
        call_factory("net.py:factory(depth=2)", {"depth": 3})


def test_names_and_folders() -> None:
    assert [source_name(text) for text in ("net.py:gpt", "a/net.py:factory(depth=8)", "transformers:x/llama.json", "shop.unet:main")] == [
        "gpt",
        "net(depth=8)",
        "llama",
        "unet",
    ]
    base = Path("base")
    assert relative_to("net.py:factory(depth=8)", base) == "base/net.py:factory(depth=8)"
    assert relative_to("transformers:llama.json", base) == "transformers:base/llama.json"
    assert relative_to("shop.models:factory", base) == "shop.models:factory"
    assert relative_to("/net.py:factory", base) == "/net.py:factory"


# -- transformers ----------------------------------------------------------------------------------------------------------------------


def test_a_configuration_becomes_a_model_on_meta() -> None:
    pytest.importorskip("transformers")
    made = call_factory("transformers:llama.json", {"batch": 3, "sequence": 16})
    assert type(made.model).__name__ == "LlamaForCausalLM"
    assert made.model.training
    assert {(str(parameter.device), str(parameter.dtype)) for parameter in made.model.parameters()} == {("meta", "torch.float32")}
    assert {name: tuple(value.shape) for name, value in made.kwargs.items()} == {"input_ids": (3, 16), "labels": (3, 16)}
    assert tuple(call_factory("transformers:llama.json").kwargs["input_ids"].shape) == (8, 64)


def test_a_folder_with_a_configuration(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps({**LLAMA, "architectures": None}))
    assert type(call_factory("transformers:small").model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32, "patch_size": 8},
            {"pixel_values"},
        ),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1,
             "num_heads": 2, "vocab_size": 64},
            {"input_ids", "decoder_input_ids", "labels"},
        ),
        (
            {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32, "vocab_size": 64},
            {"input_ids"},
        ),
        (
            {"model_type": "clip", "architectures": ["CLIPModel"],
             "text_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64},
             "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                               "image_size": 32, "patch_size": 8}},
            {"input_ids", "pixel_values"},
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_inputs_by_the_kind_of_model(fields: dict[str, Any], inputs: set[str], folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "other.json").write_text(json.dumps(fields))
    assert set(call_factory("transformers:other.json(batch=2)").kwargs) == inputs


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "abacus"}', "has no model_type 'abacus'"),
        ('{"model_type": "llama", "architectures": ["AbacusForCausalLM"]}', "has no AbacusForCausalLM"),
        ('{"model_type": "vit", "architectures": ["ViTModel"], "image_size": 32}', "takes no tokens, and so no sequence"),
        ('{"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"], "num_hidden_layers": 1}', "takes input_values"),
        ('{"model_type": "llama", "architectures": ["LlamaModel"], "hidden_size": "x"}', "refuses the configuration"),
    ],
)
def test_configurations_that_give_no_model(content: str, problem: str, folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "other.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        call_factory("transformers:other.json", {"sequence": 4})
    assert problem in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as caught:
        call_factory("transformers:llama.json")
    assert "needs transformers, which is not installed\n  remedy: pip install 'torch-partitioner[transformers]'" in str(caught.value)
