"""With one microbatch, dropout draws what the unpartitioned model draws for the same seed, whatever the stages and cuts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionWarning, Plan, partition
from tests.support.running.slow_values import all_but, slow

X = torch.randn(6, 8, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(8, 2)).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [
        ("pipeline", "full"),
        pytest.param("model", "none", marks=pytest.mark.slow),
        pytest.param("model", "full", marks=pytest.mark.slow),
        pytest.param("pipeline", "none", marks=pytest.mark.slow),
    ],
)
def test_same_seed_same_masks(mode: str, recompute: str) -> None:
    model = network()
    pm = partition(model, devices=3, mode=mode, example_inputs=(X,), n_microbatches=1, recompute=recompute)
    target = torch.randn(6, 2, dtype=torch.float64)
    torch.manual_seed(5)
    loss = pm.train_step(X, target=target, loss_fn=loss_of)
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    expected = loss_of(reference(X), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


class Attention(nn.Module):
    """Dropout of attention weights, of a residual branch and inside a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed_forward = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, 8)))
        result: Tensor = x + self.feed_forward(x)
        return result


MESHES = [{"tensor": 2}, {"data": 2}, {"fsdp": 4}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{name}{size}" for name, size in mesh.items()))
def test_cut_models_draw_the_masks_of_the_whole(mesh: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Attention().double()
    x, target = torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 5, 8, dtype=torch.float64)
    pm = partition(model, devices=math.prod(mesh.values()), mode=mesh, example_inputs=(x,), n_microbatches=1)
    reference = copy.deepcopy(model)
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = loss_of(reference(x), target)
        expected.backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        loss = pm.train_step(x, target=target, loss_fn=loss_of)
        assert torch.equal(torch.get_rng_state(), after)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"tensor": 2}, {"data": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_a_model_that_begins_with_dropout(mesh: dict[str, int]) -> None:
    """The mask is written before all that a plan knows by name."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Dropout(0.3), *network().children())
    pm = partition(model, devices=math.prod(mesh.values()), mode=mesh, example_inputs=(X,), n_microbatches=1)
    assert Plan.from_json(pm.plan.to_json()) == pm.plan
    torch.manual_seed(5)
    expected = model(X)
    torch.manual_seed(5)
    torch.testing.assert_close(pm(X), expected, rtol=1e-12, atol=1e-12)


def some_columns(x: Tensor) -> Tensor:
    """Draw normal numbers into memory with gaps, which kernels draw in another order."""
    numbers = torch.zeros(4, 5, 8, dtype=x.dtype)
    numbers[..., ::2].normal_()
    return x.transpose(0, 1) + numbers + torch.rand(1)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "bernoulli_ of a number": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of a row": lambda x: x * torch.empty_like(x).bernoulli_(x[0].sigmoid()),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "randn_like": lambda x: x * torch.randn_like(x),
    "normal_": lambda x: x + x.detach().clone().normal_(0.5, 2.0),
    "normal_ of some columns": some_columns,
}


@pytest.mark.parametrize("mode", ["tensor", *slow("model", "data")])
@pytest.mark.parametrize("draw", all_but(["randn_like"], DRAWS))
def test_numbers_lie_as_the_memory_of_a_transposed_value_does(draw: str, mode: str) -> None:
    class Transposed(nn.Module):
        """Attention of torch with ``batch_first=True`` drops values with such strides."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            drawn: Tensor = DRAWS[draw](self.linear(x).transpose(0, 1))
            return (drawn if drawn.shape == x.shape else drawn.transpose(0, 1)).tanh()

    torch.manual_seed(1)
    model, x = Transposed().double(), torch.randn(4, 5, 8, dtype=torch.float64)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,))
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(pm(x), expected, rtol=1e-12, atol=1e-12)


class Permuted(nn.Module):
    """A view of its input, with dimensions in another order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll((1, -2), (1, 3))


KERNELS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "batch norm, width before height": lambda: (Permuted(0, 1, 3, 2), nn.BatchNorm2d(8)),
    "batch norm, channels last": lambda: (Permuted(0, 3, 1, 2), nn.BatchNorm2d(7)),
    "batch norm of a sequence": lambda: (nn.Sequential(nn.Flatten(2), Permuted(0, 2, 1)), nn.BatchNorm1d(42)),
    "roll, channels last": lambda: (Permuted(0, 3, 1, 2), Rolled()),
}


@pytest.mark.parametrize("mode", ["data", *slow("model")])
@pytest.mark.parametrize("kind", all_but(["roll, channels last"], KERNELS))
def test_numbers_lie_as_kernels_lay_values_out(kind: str, mode: str) -> None:
    """These return other strides than their fake results, and later values keep the order."""
    torch.manual_seed(1)
    model = nn.Sequential(*KERNELS[kind](), nn.Tanh(), nn.Dropout(0.4)).double()
    x = torch.randn(4, 8, 6, 7, dtype=torch.float64)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,))
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(pm(x), expected, rtol=1e-12, atol=1e-12)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.transpose(-1, -2), 0.4)


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(memory_format=torch.channels_last)


SHAPES = ((4, 4, 8, 4), (4, 3, 8, 5), (2, 3, 4, 5), (1, 3, 4, 5))  # sizes of 4: traced with another batch size
QUICK_SHAPES = {("model", SHAPES[3]), ("data", SHAPES[0])}


@pytest.mark.filterwarnings("ignore:a batch of 1 rows does not divide over 2 ranks")
@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        pytest.param(mode, shape, id=f"{mode}-shape{place}", marks=() if (mode, shape) in QUICK_SHAPES else pytest.mark.slow)
        for mode in ("model", "data")
        for place, shape in enumerate(SHAPES)
    ],
)
def test_numbers_lie_as_the_memory_of_a_channels_last_input_does(shape: tuple[int, ...], mode: str) -> None:
    model, x = Dropped(), channels_last(*shape)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,))
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    assert torch.equal(pm(x), expected)


class Recurrent(nn.Module):
    """Recurrent layers with dropout between them, after a layer."""

    def __init__(self, layers: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 8), layers, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sequence, state = self.layers(self.first(x))
        return self.last(sequence), state[0].sin() if isinstance(state, tuple) else state.sin()


RECURRENT: dict[str, Callable[[], tuple[nn.RNNBase, int]]] = {
    "LSTM": lambda: (nn.LSTM(8, 6, num_layers=2, dropout=0.4, batch_first=True), 6),
    "LSTM of both directions, projected": lambda: (nn.LSTM(8, 6, 3, dropout=0.4, batch_first=True, bidirectional=True, proj_size=4), 8),
    "GRU without biases": lambda: (nn.GRU(8, 6, num_layers=3, dropout=0.4, batch_first=True, bias=False), 6),
    "RNN, time first": lambda: (nn.RNN(8, 6, num_layers=2, dropout=0.4, bidirectional=True), 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "model", "data", "fsdp"])
@pytest.mark.parametrize("kind", [kind for kind in RECURRENT if "time first" not in kind])
def test_recurrent_layers_drop_what_they_drop_in_the_model(kind: str, mode: str) -> None:
    """The draws are inside of one operator, which autograd decomposes into others that draw other numbers."""
    trained_with_the_same_draws(kind, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["model", "tensor"])  # the batch is the second dimension
def test_recurrent_layers_that_take_time_first(mode: str) -> None:
    trained_with_the_same_draws("RNN, time first", mode)


def trained_with_the_same_draws(kind: str, mode: str) -> None:
    """Check that outputs, states and gradients on two devices are those of the model, for two seeds."""
    torch.manual_seed(1)
    layers, width = RECURRENT[kind]()
    model, x = Recurrent(layers, width).double(), torch.randn(4, 5, 8, dtype=torch.float64)
    pm = partition(model, devices=2, mode=mode, example_inputs=(x,))
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected, state = model(x)
        gradients = torch.autograd.grad(expected.square().mean() + state.mean(), list(model.parameters()))
        torch.manual_seed(seed)
        found, found_state = pm(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_state, state, rtol=1e-12, atol=1e-12)
        pm.zero_grad()
        (found.square().mean() + found_state.mean()).backward()
        full = pm.full_gradients()
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(full[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_an_input_in_another_memory_format_than_the_traced_is_reported() -> None:
    pm = partition(Dropped(), devices=2, mode="data", example_inputs=(torch.randn(4, 3, 8, 5, dtype=torch.float64),))
    with pytest.warns(PartitionWarning, match=r"x has its dimensions in the order \(0, 2, 3, 1\) in memory, and was traced with") as found:
        pm(channels_last(4, 3, 8, 5))
    assert "x.contiguous()" in str(found[0].message)


class Towers(nn.Module):
    """Two branches that read the input, and a third whose result nothing reads: all of them drop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unread = network(), network(), network()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        self.unread(x.flip(1))
        return torch.as_tensor(first + self.second(x.cos()))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), [("Interleaved1F1B", 4), ("1F1B", 2), ("ZBV", 4), ("ZBV", 6)])
def test_stages_draw_in_the_order_of_the_model(schedule: str, stages: int) -> None:
    """Whether they wait for each other or not: a rank whose stages read no other's could be ahead."""
    model = Towers()
    devices = 3 if stages == 6 else 2
    pm = partition(
        model, devices, "pipeline", example_inputs=(X,), n_microbatches=1, schedule=schedule, stages_per_device=stages // devices
    )
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        torch.testing.assert_close(pm(X), expected, rtol=1e-12, atol=1e-12)
        torch.manual_seed(seed)
        loss = pm.train_step(X, target=torch.zeros(6, 2, dtype=torch.float64), loss_fn=loss_of)
        torch.testing.assert_close(loss, expected.detach().square().mean(), rtol=1e-12, atol=1e-12)


def test_an_unread_draw_on_another_rank_comes_first() -> None:
    """The last stage reads the first, which the same rank has, and no stage in between."""

    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            normal = self.norm(x)
            nn.functional.dropout(x.transpose(0, 1), 0.4)
            return nn.functional.dropout(self.last(normal), 0.3)

    model = Unread().double()
    pm = partition(model, 2, "pipeline", example_inputs=(X,), n_microbatches=1, schedule="ZBV", stages_per_device=2)
    torch.manual_seed(5)
    expected = model(X)
    torch.manual_seed(5)
    torch.testing.assert_close(pm(X), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_gradients", [True, *slow(False)])
@pytest.mark.parametrize(
    ("is_turned", "devices", "mode"),
    [
        pytest.param(
            is_turned,
            devices,
            mode,
            id=f"{'turned_input' if is_turned else 'turned_inside'}-{devices}-{mode}",
            marks=() if (is_turned, mode) == (False, "pipeline") else pytest.mark.slow,
        )
        for is_turned in (False, True)
        for devices, mode in ((1, "model"), (2, "model"), (2, "pipeline"), (2, "data"))
    ],
)
def test_what_turns_back_to_rows_is_drawn_in_rows(devices: int, mode: str, *, is_turned: bool, with_gradients: bool) -> None:
    """A stage has dense inputs, whatever strides they have in the model: what it turns is not what the model turned back."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x if is_turned else self.first(x).transpose(-1, -2)
            result: Tensor = self.last(nn.functional.dropout(hidden.transpose(-1, -2) * 2, 0.4))
            return result

    model, x = Turned().double(), torch.randn(4, 12, 5, dtype=torch.float64)
    x = x.transpose(-1, -2) if is_turned else x
    pm = partition(model, devices, mode, example_inputs=(x,), n_microbatches=1 if mode == "pipeline" else None)
    with torch.set_grad_enabled(with_gradients):
        torch.manual_seed(5)
        expected = model(x)
        torch.manual_seed(5)
        torch.testing.assert_close(pm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", [2, *slow(1)])
@pytest.mark.parametrize(
    ("write", "is_turned_back"),
    [
        pytest.param(write, turned, marks=() if (write, turned) in {("index_add", False), ("through_view", True)} else pytest.mark.slow)
        for write in ("index_add", "through_view", "windows", "copy", "mask")
        for turned in (False, True)
    ],
)
def test_what_is_written_in_place_is_drawn_in_its_memory(write: str, devices: int, *, is_turned_back: bool) -> None:
    """A write in place keeps the strides of a transpose; the operator without a write may return rows."""

    class Written(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            columns = torch.sin(x.transpose(0, 1))
            hidden = columns.clone()
            if write == "index_add":
                hidden.index_add_(0, torch.tensor([0]), columns.narrow(0, 0, 1))
            elif write == "through_view":
                hidden.narrow(1, 0, 1).mul_(2)
            elif write == "windows":
                hidden.unfold(0, 2, 2).mul_(2)
            elif write == "copy":
                hidden.copy_(columns.contiguous() * 3)
            else:
                hidden.masked_fill_(columns > 0, 1.0)
            hidden = hidden.transpose(0, 1) if is_turned_back else hidden
            return nn.functional.dropout(hidden * 1.5, 0.4), torch.rand_like(hidden)

    model, x = Written(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(model, devices, "model", example_inputs=(x,))
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(pm(x), expected, rtol=1e-12, atol=1e-12)


def test_microbatches_draw_their_own() -> None:
    rows = X[:1].expand(6, 8).contiguous()
    pm = partition(network(), devices=2, mode="pipeline", example_inputs=(rows,), n_microbatches=3)
    torch.manual_seed(5)
    with torch.no_grad():
        output = pm(rows)
    assert len({tuple(row.tolist()) for row in output}) > 1


def test_evaluation_draws_nothing() -> None:
    pm = partition(network(), devices=2, mode="pipeline", example_inputs=(X,), n_microbatches=3, training=False)
    state = torch.get_rng_state()
    with torch.no_grad():
        pm(X)
    assert torch.equal(torch.get_rng_state(), state)
