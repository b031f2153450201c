"""Decisions by values that a trace knows: of constants, of sizes and of buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError, TraceError
from tests.support.running.slow_values import all_but, slow

Decide = Callable[["Decides", Tensor], Tensor]


class Decides(nn.Module):
    """Two layers, and a function between them that decides by values."""

    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self.first, self.last, self.decide = nn.Linear(6, 6), nn.Linear(6, 6), decide
        self.table = torch.tensor([1, 5, 2])
        self.flag: Tensor
        self.register_buffer("flag", torch.tensor([0.0, 1.0, 0.0]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.decide(self, self.first(x)))
        return y


def of_a_literal(_: Decides, h: Tensor) -> Tensor:
    return h[:, : int(torch.tensor([2, 4]).max())].sum(1, keepdim=True) + h


def of_a_list(_: Decides, h: Tensor) -> Tensor:
    left, right = torch.tensor([2, 4]).tolist()
    return torch.cat(h.split([left, right], 1)[::-1], 1)


def of_a_size(_: Decides, h: Tensor) -> Tensor:
    return h * torch.ones(h.shape[1], h.shape[1]).tril().sum().item()


def of_the_batch(_: Decides, h: Tensor) -> Tensor:
    return h * 2 if (torch.arange(h.shape[0]) > 5).any() else h * 3


def of_a_shape(_: Decides, h: Tensor) -> Tensor:
    return h * 2 if (torch.zeros_like(h) == 0).all() else h


def written_in_place(_: Decides, h: Tensor) -> Tensor:
    mask = torch.zeros(6)
    mask[2:] = 5
    view = mask.view(2, 3)
    view[0].add_(4)
    return h * int(mask.max())


def compared(_: Decides, h: Tensor) -> Tensor:
    return h * 2 if torch.equal(torch.ones(3), torch.ones(3)) and torch.allclose(torch.ones(3), torch.ones(3)) else h


def of_an_attribute(self: Decides, h: Tensor) -> Tensor:
    return h * 2 if (self.table == 5).any() else h


def of_a_buffer(self: Decides, h: Tensor) -> Tensor:
    return h * 2 if (self.flag == 1).any() else h


def chosen_by_a_mask(_: Decides, h: Tensor) -> Tensor:
    kept = torch.arange(6) >= 2
    return torch.cat([h[:, kept], h[:, ~kept]], 1)


def chosen_by_positions(_: Decides, h: Tensor) -> Tensor:
    kept = (torch.arange(6) % 2 == 0).nonzero().squeeze(1)
    return torch.cat([h[:, kept], h[:, kept + 1]], 1)


ALL: tuple[Decide, ...] = (
    *(of_a_literal, of_a_list, of_a_size, of_the_batch, of_a_shape, written_in_place, compared, of_an_attribute, of_a_buffer),
    *(chosen_by_a_mask, chosen_by_positions),
)
QUICK = (of_a_literal, of_a_size, written_in_place)


@pytest.mark.parametrize("decide", all_but(QUICK, ALL), ids=lambda decide: decide.__name__)
def test_known_values_decide(decide: Decide) -> None:
    """A batch that another decision belongs to is traced anew."""
    torch.manual_seed(0)
    model = Decides(decide)
    reference = copy.deepcopy(model)
    partitioned = partition(model, 2, mode="pipeline", example_inputs=(torch.randn(4, 6).double(),))
    for rows in (4, 8):
        x = torch.randn(rows, 6).double()
        partitioned(x).square().sum().backward()
        reference(x).square().sum().backward()
        torch.testing.assert_close(partitioned(x), reference(x), rtol=0, atol=1e-12)
    grads = {name: each.grad for name, each in partitioned.named_parameters()}
    torch.testing.assert_close(grads, {name: each.grad for name, each in reference.named_parameters()}, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["data", *slow("model", "fsdp", "tensor")])
@pytest.mark.parametrize("decide", [of_the_batch, of_a_buffer, chosen_by_a_mask], ids=lambda decide: decide.__name__)
def test_known_values_decide_in_every_mode(mode: str, decide: Decide) -> None:
    model, x = Decides(decide), torch.randn(8, 6).double()
    expected = model(x)
    torch.testing.assert_close(partition(model, 2, mode=mode, example_inputs=(x,))(x), expected, rtol=0, atol=1e-12)


def test_sizes_that_no_decision_reads_stay_open() -> None:
    graph = trace(Decides(of_a_size), (torch.randn(4, 6).double(),))
    assert graph.batch is not None
    assert trace(Decides(of_the_batch), (torch.randn(4, 6).double(),)).batch is None


class Gated(nn.Module):
    """Copies that differ in a buffer by whose values they decide."""

    def __init__(self, is_open: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6))
        self.gate: Tensor
        self.register_buffer("gate", torch.tensor(is_open))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if self.gate else y


def test_copies_decide_each_for_itself() -> None:
    model, x = nn.Sequential(*(Gated(bool(number % 2)) for number in range(4))), torch.randn(4, 6)
    expected = model(x)
    torch.testing.assert_close(partition(model, 2, mode="pipeline", example_inputs=(x,))(x), expected)


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "fsdp")])
def test_changed_buffers_are_refused(mode: str) -> None:
    model, x = Decides(of_a_buffer), torch.randn(4, 6).double()
    partitioned = partition(model, 2, mode=mode, example_inputs=(x,))
    state = {name: value.clone() for name, value in partitioned.state_dict().items()}
    partitioned.load_state_dict({**state, "flag": torch.zeros(3).double()})
    for training in (True, False):
        with pytest.raises(ConfigError, match="the buffer flag has other values than when the model was traced"):
            partitioned.train(training)(x)
    partitioned.load_state_dict(state)
    torch.testing.assert_close(partitioned(x), model(x), rtol=0, atol=1e-12)
    with torch.no_grad():
        for buffer in partitioned.buffers():
            buffer.data.zero_()
    with pytest.raises(ConfigError, match="partition it again"):
        partitioned(x)


def of_an_input(_: Decides, h: Tensor) -> Tensor:
    return h * 2 if (h > 0).all() else h


def of_a_mask_of_inputs(_: Decides, h: Tensor) -> Tensor:
    mask = torch.zeros(6).double()
    mask[0] = h[0, 0]
    return h * 2 if mask.any() else h


def of_a_draw(_: Decides, h: Tensor) -> Tensor:
    return h * 2 if (torch.rand(3) > 0.5).any() else h


def of_a_parameter(self: Decides, h: Tensor) -> Tensor:
    return h * 2 if (self.first.weight > 0).any() else h


@pytest.mark.parametrize("decide", [of_an_input, of_a_mask_of_inputs, of_a_draw, of_a_parameter], ids=lambda decide: decide.__name__)
def test_other_values_are_refused_with_their_line(decide: Decide) -> None:
    with pytest.raises(TraceError, match="lets the values of a tensor decide") as caught:
        trace(Decides(decide), (torch.randn(4, 6).double(),))
    assert caught.value.place is not None
    assert f"{__file__}:" in str(caught.value.place.source)


def counts(self: Decides, h: Tensor) -> Tensor:
    h = h * 2 if (self.flag == 1).any() else h
    self.flag.add_(1)
    return h


def test_buffers_that_forward_writes_are_refused() -> None:
    with pytest.raises(TraceError, match="decides by the values of the buffer flag, and writes it"):
        trace(Decides(counts), (torch.randn(4, 6).double(),))


@pytest.mark.parametrize("known", [True, False])
def test_models_on_meta_decide_by_values_that_their_constructor_computes(known: bool) -> None:
    with torch.device("meta"):
        model = Decides(of_an_attribute)
    if not known:
        model.table = torch.empty(4, device="meta", dtype=torch.int64)
    if known:
        trace(model, (torch.randn(4, 6).double(),))
    else:
        with pytest.raises(TraceError, match="lets the values of a tensor decide"):
            trace(model, (torch.randn(4, 6).double(),))
