"""One partition serves every length of its sequences, and every size of its images, as far as the model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Plan, partition
from partitioner.tracing.export import export
from passes.ir.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

ROWS, VOCABULARY, LONGEST = 4, 23, 160


class Decoder(nn.Module):
    """A small GPT with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(LONGEST, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=hidden.dtype)
        logits: Tensor = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return logits


class Recurrent(nn.Module):
    """An LSTM, whose trace is for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x)[0])
        return logits


class Translator(nn.Module):
    """Two sequences, each with a length of its own, and a mask for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.attention = nn.Embedding(VOCABULARY, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        memory = self.token(source)
        mixed, _ = self.attention(self.token(target), memory, memory, key_padding_mask=mask == 0, need_weights=False)
        logits: Tensor = self.head(mixed)
        return logits


class Waves(nn.Module):
    """Convolutions over the samples of a wave (batch, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 4, 5, stride=2, padding=2), nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        features: Tensor = self.second(torch.relu(self.first(wave[:, None])))
        return features.transpose(1, 2)


class Weighted(nn.Module):
    """Steps of a sequence, each times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        logits: Tensor = self.head(x * weights[..., None])
        return logits


class Vocoder(nn.Module):
    """A wave of four samples a frame, beside its frames: the two lengths change together."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.wave = nn.ConvTranspose1d(8, 6, 8, stride=4, padding=2), nn.Conv1d(1, 6, 3, padding=1)
        self.head = nn.Conv1d(6, 1, 1)

    def forward(self, wave: Tensor, frames: Tensor) -> Tensor:
        samples: Tensor = self.head(torch.tanh(self.wave(wave) + self.frames(frames)))
        return samples


class Mono(nn.Module):
    """The mean of any number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.head(torch.relu(self.first(x.mean(1, keepdim=True))))
        return mixed


class Films(nn.Module):
    """The mean of the frames of a film (batch, frames, 3, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, films: Tensor) -> Tensor:
        features = self.frame(films.flatten(0, 1)).mean((-1, -2)).unflatten(0, films.shape[:2])
        logits: Tensor = self.head(features.mean(1))
        return logits


TABLE = 16


class Positions(nn.Module):
    """Every fourth sample of a wave, with a learned position each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.position = nn.Conv1d(3, 8, 4, stride=4), nn.Parameter(torch.randn(TABLE, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x).transpose(1, 2)
        logits: Tensor = self.head(torch.relu(steps + self.position[: steps.shape[1]]))
        return logits


class Sliced(nn.Module):
    """A decoder whose positions and mask are parts of tables."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(1, TABLE, 8))
        self.register_buffer("mask", torch.ones(TABLE, TABLE, dtype=torch.bool).tril())
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        query, key, value = self.qkv(self.token(tokens) + self.position[:, :length]).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).masked_fill(~self.mask[:length, :length], -torch.inf)
        logits: Tensor = self.head(scores.softmax(-1) @ value)
        return logits


class SlicedImages(nn.Module):
    """Convolutions between which parts of tables are added and multiplied."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(1, 4, TABLE, TABLE))
        self.register_buffer("scale", torch.randn(TABLE, TABLE))

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        result: Tensor = self.second(torch.relu(self.first(image) + self.shift[:, :, :height, :width]) * self.scale[:height, :width])
        return result


def tokens(length: int, rows: int = ROWS) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(kept)


def untraced() -> Any:
    """While active, a trace of a model fails; losses are traced for each length."""
    original = export.export

    def only_losses(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert type(model).__name__ == "_Loss", "a model is traced again"
        return original(model, *args, **kwargs)

    return mock.patch("partitioner.tracing.export.dynamic_batch.export", only_losses)


def assert_trains_alike(model: nn.Module, pm: Any, inputs: tuple[Tensor, ...], target: Tensor, loss: Callable[..., Tensor]) -> None:
    """Compare outputs, loss and gradients of a call and of a step with the model's."""
    reference = copy.deepcopy(model)
    expected = reference(*inputs)
    value = loss(expected, target)
    value.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for in_step in (False, True):
        pm.zero_grad()
        found = pm.train_step(*inputs, target=target, loss_fn=loss) if in_step else loss(pm(*inputs), target)
        if not in_step:
            found.backward()
        torch.testing.assert_close(found.detach(), value.detach(), atol=1e-9, rtol=0)
        for name, gradient in pm.full_gradients().items():
            torch.testing.assert_close(gradient, gradients[name], atol=1e-9, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(pm(*inputs), expected.detach(), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
        pytest.param("sequence", 3, id="uneven_sequence", marks=pytest.mark.slow),
        *(pytest.param(mode, 2, marks=pytest.mark.slow) for mode in ("model", "tensor", "data", "fsdp")),
        pytest.param({"data": 2, "tensor": 2}, 4, id="data_tensor", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "sequence": 2}, 4, id="pipeline_sequence", marks=pytest.mark.slow),
    ],
)
def test_lengths(mode: str | Mapping[str, int], devices: int) -> None:
    model = Decoder()
    pm = partition(model, devices, mode, example_inputs=(tokens(12),))
    with untraced():
        for length in (7, 64, 129):
            assert_trains_alike(model, pm, (tokens(length),), tokens(length), token_loss)
        assert pm.check(tokens(9))
    assert pm.plan.prediction.sizes == (("length", 12),)
    assert "priced for length 12" in pm.explain()


def assert_computes_alike(model: nn.Module, pm: Any, *inputs: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(pm(*inputs), model(*inputs), atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("planned", [8, TABLE])
def test_tables_are_read_by_length(planned: int) -> None:
    model = Sliced()
    pm = partition(model, 2, "sequence", example_inputs=(tokens(planned),))
    for length in {1, 6, 8, TABLE}:
        assert_computes_alike(model, pm, tokens(length))


@pytest.mark.slow
@pytest.mark.parametrize("planned", [8, 12, TABLE])
@pytest.mark.parametrize(("mode", "devices"), [("sequence", 2), ("tensor", 2), ("fsdp", 2), ({"data": 2, "sequence": 2}, 4)])
def test_tables_that_are_read_by_length_train(mode: str | Mapping[str, int], devices: int, planned: int) -> None:
    model = Sliced()
    pm = partition(model, devices, mode, example_inputs=(tokens(planned),))
    for length in (planned, 1, 4, 6, 8, 10, 15, TABLE):
        assert_trains_alike(model, pm, (tokens(length),), tokens(length), token_loss)
    pm.eval()
    for length in (planned, 4, 6, TABLE):
        assert_computes_alike(model, pm, tokens(length))


@pytest.mark.parametrize(
    ("mode", "devices", "planned", "called"),
    [
        ("tile", 2, (8, 8), [(16, 12)]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ({"tile": (2, 2)}, 4, (TABLE, TABLE), [(8, 6)]),
                ("tile", 2, (8, 6), [(TABLE, TABLE), (4, 8), (7, 9)]),
                ("tile", 2, (8, TABLE), [(TABLE, 8), (7, 9)]),
                ({"tile": (2, 2)}, 4, (8, 8), [(TABLE, TABLE), (6, 8)]),
                ({"data": 2, "tile": 2}, 4, (TABLE, TABLE), [(8, 8), (7, 9)]),
                ("fsdp", 2, (8, TABLE), [(TABLE, TABLE), (7, 9)]),
            )
        ),
    ],
)
def test_tables_are_read_by_height_and_width(mode: Any, devices: int, planned: tuple[int, int], called: list[tuple[int, int]]) -> None:
    model = SlicedImages()
    pm = partition(model, devices, mode, example_inputs=(torch.randn(2, 3, *planned),))
    for size in called:
        assert_computes_alike(model, pm, torch.randn(2, 3, *size))
    size = called[-1]
    if len(called) > 1:
        assert_trains_alike(model, pm, (torch.randn(2, 3, *size),), torch.randn(2, 2, *size), F.mse_loss)


def test_a_length_beyond_the_table_of_positions_is_refused() -> None:
    pm = partition(Decoder(), 2, "pipeline", example_inputs=(tokens(12),))
    with pytest.raises(ConfigError, match=rf"does not take length 161: it looks up row 160 of a table that has {LONGEST}"):
        pm(tokens(LONGEST + 1))
    with pytest.raises(ConfigError, match="its length is 0"):
        pm(tokens(0))


@pytest.mark.slow
def test_a_saved_plan_serves_a_model_traced_with_another_length() -> None:
    model = Decoder()
    plan = Plan.from_json(partition(model, 2, "pipeline", example_inputs=(tokens(12),)).plan.to_json())
    pm = partition(model, 2, example_inputs=(tokens(20),), plan=plan)
    assert pm.plan.prediction.sizes == (("length", 12),)
    inputs = tokens(5)
    torch.testing.assert_close(pm(inputs), model(inputs))


@pytest.mark.slow
def test_two_sequences_have_two_lengths() -> None:
    model = Translator()
    pm = partition(model, 2, "pipeline", example_inputs=(tokens(8), torch.ones(ROWS, 8, dtype=torch.long), tokens(8)))
    mask = torch.ones(ROWS, 11, dtype=torch.long)
    mask[0, 9:] = 0
    with untraced():
        assert_trains_alike(model, pm, (tokens(11), mask, tokens(5)), tokens(5), token_loss)
    with pytest.raises(ConfigError, match="differ in length: source has 11, mask has 10"):
        pm(tokens(11), mask[:, :10], tokens(5))


@pytest.mark.slow
def test_a_length_that_the_model_makes_a_constant_is_traced_anew() -> None:
    model = Recurrent()
    pm = partition(model, 2, "pipeline", example_inputs=(torch.randn(ROWS, 12, 6),))
    assert_trains_alike(model, pm, (torch.randn(ROWS, 5, 6),), torch.randn(ROWS, 5, 3), F.mse_loss)


@pytest.mark.slow
def test_a_length_of_one_is_traced_by_itself() -> None:
    model = Decoder()
    pm = partition(model, 2, "tensor", example_inputs=(tokens(12),))
    assert_trains_alike(model, pm, (tokens(1),), tokens(1), token_loss)


@pytest.mark.slow
def test_heights_and_widths() -> None:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    pm = partition(model, 2, "data", example_inputs=(torch.randn(ROWS, 3, 16, 16),))
    assert_trains_alike(model, pm, (torch.randn(ROWS, 3, 16, 24),), torch.randn(ROWS, 2), F.mse_loss)
    with untraced():
        assert_trains_alike(model, pm, (torch.randn(ROWS, 3, 20, 10),), torch.randn(ROWS, 2), F.mse_loss)
    with pytest.raises(ConfigError, match=r"args\[0\]|input has shape"):
        pm(torch.randn(ROWS, 5, 16, 16))


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        ("data", 2),
        *(
            pytest.param(mode, devices, marks=pytest.mark.slow)
            for mode, devices in (("tile", 2), ("pipeline", 2), ("tensor", 2), ({"data": 2, "tile": 2}, 4))
        ),
    ],
)
def test_samples_of_channels(mode: str | Mapping[str, int], devices: int) -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 2, 3, padding=1)).eval()
    pm = partition(model, devices, mode, example_inputs=(torch.randn(ROWS, 4, 16),))
    for length in (24, 17):
        assert_trains_alike(model, pm, (torch.randn(ROWS, 4, length),), torch.randn(ROWS, 2, length), F.mse_loss)
    assert pm.plan.prediction.sizes == (("length", 16),)
    with pytest.raises(ConfigError, match=r"the model was traced with \(batch, 4, length\)"):
        pm(torch.randn(ROWS, 5, 16))


@pytest.mark.parametrize("mode", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_samples_of_waves(mode: str) -> None:
    model = Waves()
    pm = partition(model, 2, mode, example_inputs=(torch.randn(ROWS, 64),))
    for samples in (100, 33):
        assert_trains_alike(model, pm, (torch.randn(ROWS, samples),), torch.randn(ROWS, (samples + 1) // 2, 3), F.mse_loss)


def test_weights_of_steps_have_the_length_of_the_steps() -> None:
    model = Weighted()
    pm = partition(model, 2, "data", example_inputs=(torch.randn(ROWS, 5, 6), torch.rand(ROWS, 5)))
    assert_trains_alike(model, pm, (torch.randn(ROWS, 9, 6), torch.rand(ROWS, 9)), torch.randn(ROWS, 9, 3), F.mse_loss)


@pytest.mark.parametrize(("shape", "called", "words"), [((8,), (9,), "batch, 8"), ((5, 8), (5, 9), "batch, length, 8")])
def test_other_numbers_of_features_are_refused(shape: tuple[int, ...], called: tuple[int, ...], words: str) -> None:
    pm = partition(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2, "data", example_inputs=(torch.randn(ROWS, *shape),))
    with pytest.raises(ConfigError, match=rf"the model was traced with \({words}\)"):
        pm(torch.randn(ROWS, *called))


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        pytest.param(Vocoder, [[(1, 40), (8, 10)], [(1, 52), (8, 13)], [(1, 28), (8, 7)]], id="related_lengths"),
        pytest.param(Mono, [[(2, 10)], [(3, 12)], [(6, 10)]], id="channels", marks=pytest.mark.slow),
        pytest.param(Films, [[(5, 3, 6, 6)], [(2, 3, 6, 6)], [(3, 3, 7, 6)]], id="frames", marks=pytest.mark.slow),
        pytest.param(Positions, [[(3, 48)], [(3, 64)], [(3, 20)]], id="table"),
    ],
)
@pytest.mark.parametrize("mode", ["data", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fsdp", "tensor", "pipeline"))])
def test_sizes_that_a_call_shows(build: Callable[[], nn.Module], shapes: list[list[tuple[int, ...]]], mode: str) -> None:
    model = build()
    calls = [tuple(torch.randn(ROWS, *shape) for shape in each) for each in shapes]
    pm = partition(model, 2, mode, example_inputs=calls[0])
    for call in (*calls, calls[1]):
        assert_trains_alike(model, pm, call, torch.randn_like(model(*call)), F.mse_loss)


def test_a_size_that_the_model_does_not_take_says_why() -> None:
    model = Vocoder()
    pm = partition(model, 2, "data", example_inputs=(torch.randn(ROWS, 1, 40), torch.randn(ROWS, 8, 10)))
    with pytest.raises(ConfigError, match=r"the model does not take length 40, length_2 11: .* must match") as found:
        pm(torch.randn(ROWS, 1, 40), torch.randn(ROWS, 8, 11))
    assert "test_open_sequence.py" in str(found.value.place)
    with torch.no_grad():
        torch.testing.assert_close(pm(*(call := (torch.randn(ROWS, 1, 44), torch.randn(ROWS, 8, 11)))), model(*call))
    with pytest.raises(
        ConfigError, match=r"frames has shape \(4, 9, 10\); the model was traced with \(batch, 8, length_2\), and does not take that"
    ):
        pm(torch.randn(ROWS, 1, 40), torch.randn(ROWS, 9, 10))


@pytest.mark.parametrize(("build", "shapes"), [(Vocoder, [[(1, 40), (8, 10)], [(1, 28), (8, 7)]]), (Waves, [[(64,)], [(33,)]])])
def test_samples_are_left_open_by_the_first_trace(build: Callable[[], nn.Module], shapes: list[list[tuple[int, ...]]]) -> None:
    model = build()
    first, second = (tuple(torch.randn(ROWS, *shape) for shape in each) for each in shapes)
    pm = partition(model, 2, "data", example_inputs=first)
    with untraced(), torch.no_grad():
        torch.testing.assert_close(pm(*second), model(*second))


class Steps(nn.Module):
    """A loop over the steps of a sequence in Python: other calls for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            hidden = self.cell(step, hidden)
        return hidden


def test_other_calls_for_another_length_are_refused_with_both_shapes() -> None:
    pm = partition(Steps(), 2, "data", example_inputs=(torch.randn(ROWS, 4, 3),))
    with pytest.raises(ConfigError, match=r"for x of shape \(batch, 6, 3\) than for x of shape \(batch, 4, 3\), which was planned"):
        pm(torch.randn(ROWS, 6, 3))
