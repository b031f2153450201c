"""Several requests in flight: whose turn it is, what an error ends, and the tokens of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import ConfigError, Constraints, PartitionedModel, partition
from partitioner.model.generation.generate import most_in_flight
from partitioner.model.generation.requests import Meanwhile, Request, answers
from tests.support.models.language import causal_model

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def counting(log: list[str], name: str, turns: int, fails_at: int | None = None) -> Request[str]:
    def request(meanwhile: Meanwhile) -> str:
        try:
            for turn in range(turns):
                if turn == fails_at:
                    raise ValueError(name)
                log.append(f"{name}{turn}")
                meanwhile()
        finally:
            log.append(f"{name} ends")
        return name

    return request


@pytest.mark.parametrize(
    ("most", "order"),
    [
        (1, "a0 a1 a-ends b0 b-ends c0 c1 c2 c-ends"),
        (2, "a0 b0 a1 b-ends c0 a-ends c1 c2 c-ends"),
        (3, "a0 b0 c0 a1 b-ends c1 a-ends c2 c-ends"),
        (8, "a0 b0 c0 a1 b-ends c1 a-ends c2 c-ends"),
    ],
)
def test_requests_go_on_in_turn(most: int, order: str) -> None:
    log: list[str] = []
    assert answers([counting(log, "a", 2), counting(log, "b", 1), counting(log, "c", 3)], most) == ["a", "b", "c"]
    assert " ".join(each.replace(" ", "-") for each in log) == order


def test_an_error_leaves_the_requests_that_wait() -> None:
    """Those that have not begun never do."""
    log: list[str] = []
    with pytest.raises(ValueError, match="b"):
        answers([counting(log, "a", 4), counting(log, "b", 4, fails_at=1), counting(log, "c", 1)], 2)
    assert log == ["a0", "b0", "a1", "b ends", "a ends"]


# -- of models -------------------------------------------------------------------------------------------------------------------------


def partitioned(name: str, devices: int, mode: Any, **options: Any) -> tuple[Any, PartitionedModel]:
    model = causal_model(name)
    split = {"gpt2": "transformer.h.1", "llama": "model.layers.1"}[name]
    constraints = Constraints(split_spec={split: "beginning"}) if mode == "pipeline" or "pipeline" in mode else None
    example = (torch.zeros(4, 8, dtype=torch.long),)
    return model, partition(model, devices, mode, example_inputs=example, constraints=constraints, progress=False, **options)


def prompts() -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens of requests of different sizes, and masks, of which the first leaves out two tokens."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, 64, (rows, tokens), generator=generator) for rows, tokens in ((2, 5), (2, 9), (4, 3))]
    masks = [torch.ones_like(each) for each in ids]
    ids[0][1, :2], masks[0][1, :2] = 0, 0
    return ids, masks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "mode", "options", "most"),
    [
        ("llama", 2, "pipeline", {"schedule": "1F1B"}, 2),
        ("gpt2", 2, "pipeline", {"schedule": "1F1B"}, 2),
        ("gpt2", 2, "pipeline", {"schedule": "DualPipeV"}, 1),
        ("gpt2", 4, {"pipeline": 2, "tensor": 2}, {"schedule": "1F1B"}, 2),
        ("llama", 4, {"data": 2, "pipeline": 2}, {"schedule": "1F1B"}, 1),
        ("llama", 2, "tensor", {}, 1),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_model(name: str, devices: int, mode: Any, options: dict[str, Any], most: int) -> None:
    model, pm = partitioned(name, devices, mode, **options)
    assert most_in_flight(pm.traced) == most
    ids, masks = prompts()
    found = pm.generate(ids, attention_mask=masks, **GREEDY)
    assert all(
        torch.equal(tokens, model.generate(each, attention_mask=mask, **GREEDY))
        for tokens, each, mask in zip(found, ids, masks, strict=True)
    )
    (alone,) = pm.generate(tuple(ids[1:2]), **GREEDY)
    assert torch.equal(alone, found[1])


@pytest.mark.slow
def test_what_has_a_state_sees_one_request_after_another() -> None:
    model, pm = partitioned("llama", 2, "pipeline", schedule="1F1B")
    ids, _ = prompts()

    def seen(generate: Callable[..., Any], requests: list[Any]) -> tuple[list[Tensor], list[int]]:
        lengths: list[int] = []

        def count(tokens: Tensor, scores: Tensor) -> Tensor:
            lengths.append(tokens.shape[1])
            return scores

        torch.manual_seed(0)
        answered = [generate(each, logits_processor=[count], **{**GREEDY, "do_sample": True}) for each in requests]
        return [tokens for each in answered for tokens in (each if isinstance(each, list) else [each])], lengths

    (expected, in_order), (found, lengths) = seen(model.generate, ids), seen(pm.generate, [ids])
    assert lengths == in_order
    assert all(map(torch.equal, found, expected))


def test_what_is_no_list_of_requests_is_refused() -> None:
    _, pm = partitioned("llama", 2, "pipeline", schedule="1F1B")
    ids, masks = prompts()
    refused: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ([], {}, "generate\\(\\) got no requests"),
        ([ids[0], ids[1].float()], {}, "input_ids is a tensor of shape \\(2, 9\\) and torch.float32"),
        ([[1, 2, 3]], {}, r"input_ids is \[1, 2, 3\] \(list\)"),
        (ids, {"attention_mask": masks[:2]}, "got 3 requests, and attention_mask is 2 of them"),
        (ids, {"attention_mask": masks[0]}, "got 3 requests, and attention_mask is a"),
        ([ids[0], ids[0].repeat(1, 12)], {}, "the cache would be full: 60 tokens and 6 new ones are 66"),
    )
    for wrong, arguments, text in refused:
        with pytest.raises(ConfigError, match=text):
            pm.generate(wrong, **{**GREEDY, **arguments})


# -- on a clock ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_in_flight_fill_the_stages() -> None:
    """Two stages of like layers: a second request costs nothing, of a third and a fourth each waits as long as one takes."""
    device = Device("slow memory", {"float32": 1e15}, 2**30, 1e6)
    cluster = Cluster([device] * 2, Link(0.0, 1e12))
    _, pm = partitioned("llama", 2, "pipeline", schedule="1F1B", cluster=cluster)
    (one,), (two,), (four,) = (pm.simulate_inference((2,), prompt=8, new_tokens=4, requests=count).batches for count in (1, 2, 4))
    assert two.per_token < 1.35 * one.per_token
    assert two.throughput > 1.5 * one.throughput
    assert 1.9 < four.per_token / two.per_token < 2.1
    assert max(one.peak_memory) < max(two.peak_memory) < max(four.peak_memory)
    table = str(pm.simulate_inference((2,), prompt=8, new_tokens=4, requests=2))
    assert table.startswith("prompts of 8 tokens, 4 new tokens a row, 2 requests in flight\n")


@pytest.mark.slow
def test_requests_that_run_one_after_another_take_the_sum() -> None:
    _, pm = partitioned("llama", 2, "tensor", cluster="h100:1x2")
    (one,), (three,) = (pm.simulate_inference((2,), prompt=8, new_tokens=4, requests=count).batches for count in (1, 3))
    assert three.latency == pytest.approx(3 * one.latency)
    assert three.throughput == pytest.approx(one.throughput)
