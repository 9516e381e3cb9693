"""Requests and results on the wire: the SDK's own messages are read and answered exactly; what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm.serve.tinker import proto
from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.wire import (
    Sampled,
    SampleOutput,
    TrainOutput,
    train_request_of_json,
    train_request_of_proto,
)


def request_of(sdk: Any, data: list[Any], config: dict[str, Any] | None = None, only: bool = False) -> bytes:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    given = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=given, model_id="a:train:0", seq_id=7)
    )
    message.forward_only = only
    return message.SerializeToString()


def test_every_message_is_described_as_the_sdk_has_it(sdk: Any) -> None:
    from tinker.proto import tinker_public_pb2 as theirs

    for name, message in proto._CLASSES.items():
        mine = {f.name: (f.number, f.type, f.has_presence) for f in message.DESCRIPTOR.fields}
        wanted = {f.name: (f.number, f.type, f.has_presence) for f in getattr(theirs, name).DESCRIPTOR.fields}
        wanted.pop("override_dimensions", None)  # of images, which are refused
        assert mine == wanted, name


def test_a_request_of_the_sdk_is_read_exactly(sdk: Any) -> None:
    import torch

    wide = torch.zeros(3, 40, dtype=torch.int64)
    wide[:, 0] = torch.tensor([5, 6, 7])
    rows = [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints([1, 2]).append_int(3),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "advantages": [0.0, 0.25, -1.5]},
        ),
        sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": wide}),
    ]
    assert rows[1].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    got = train_request_of_proto(request_of(sdk, rows, {"clip_low_threshold": 0.7, "kl": "x"}, only=True))
    assert (got.model_id, got.seq_id, got.loss_fn, got.forward_only) == ("a:train:0", 7, "ppo", True)
    assert got.settings == {"clip_low_threshold": 0.7, "kl": "x"}
    assert got.rows[0].ids.tolist() == [1, 2, 3]
    assert got.rows[0].inputs["advantages"].tolist() == [0.0, 0.25, -1.5]
    assert got.rows[0].inputs["target_tokens"].dtype == np.int64
    assert got.rows[1].inputs["target_tokens"].tolist() == wide.tolist()
    assert train_request_of_proto(request_of(sdk, rows)).digest != got.digest


def test_the_json_form_is_the_same_request(sdk: Any) -> None:
    rows = [sdk.Datum(model_input=sdk.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})]
    inputs = {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}}
    data = [{"model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}, "loss_fn_inputs": inputs}]
    body = {
        "forward_backward_input": {"data": data, "loss_fn": "ppo"},
        "model_id": "a:train:0",
        "seq_id": 7,
    }
    assert train_request_of_json(body, False).digest == train_request_of_proto(request_of(sdk, rows)).digest


def test_narrow_types_are_widened() -> None:
    message = proto.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    narrow, half = row.loss_fn_inputs["target_tokens"], row.loss_fn_inputs["weights"]
    narrow.dense, narrow.dtype = np.array([2, 3], "<i4").tobytes(), proto.INT32
    half.dense, half.dtype = (np.array([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2").tobytes(), proto.BFLOAT16
    got = train_request_of_proto(message.SerializeToString()).rows[0].inputs
    assert (got["target_tokens"].dtype, got["target_tokens"].tolist()) == (np.int64, [2, 3])
    assert (got["weights"].dtype, got["weights"].tolist()) == (np.float32, [1.5, -2.0])


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        ({"dense": b"123", "dtype": 1}, "3 bytes"),
        ({"dense": b"1234", "dtype": 1, "shape": [2]}, "do not make shape"),
        ({"dense": b"1234", "dtype": 1, "shape": [-1]}, "do not make shape"),
        ({"dense": b"1234", "dtype": 9}, "dtype 9"),
        ({"sparse_csr": {"values": b"1234"}, "dtype": 1, "shape": [2, 2]}, "CSR"),
        ({"sparse_csr": {"values": b"1234"}, "dtype": 1, "shape": [2**40, 2**40]}, "at most"),
        ({"sparse_csr": {"values": b"1234"}, "dtype": 1, "shape": [1]}, "shape"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: dict[str, Any], told: str) -> None:
    message = proto.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    row = message.data.add()
    row.loss_fn_inputs["weights"].MergeFrom(type(row.loss_fn_inputs["weights"])(**tensor))
    with pytest.raises(ApiError, match=r"data\[0\].loss_fn_inputs.weights.*" + told):
        train_request_of_proto(message.SerializeToString())


def test_images_are_refused() -> None:
    message = proto.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(ApiError, match=r"kind image; only token chunks"):
        train_request_of_proto(message.SerializeToString())


def test_the_sdk_reads_results_back_in_shape(sdk: Any) -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    rows = [np.array([-1.0, -2.0], np.float32), np.array([[-3.0, -4.0]], np.float32), np.array([-5.0], np.float32)]
    got = deserialize_forward_backward_output(TrainOutput(rows, {"loss:sum": 2.5}).as_proto())
    assert [one["logprobs"].to_numpy().tolist() for one in got.loss_fn_outputs] == [row.tolist() for row in rows]
    assert got.metrics == {"loss:sum": 2.5}

    top = (np.array([[3, 4]]), np.array([[-0.5, -1.5]], np.float32))
    prompt_top = (np.array([[0, 0], [1, 2]]), np.array([[-99999.0, -99999.0], [-1.0, -2.0]], np.float32))
    output = SampleOutput(
        [Sampled("stop", [7], [-0.5], top), Sampled("length", [8, 9], [-1.0, -2.0])],
        np.array([np.nan, -0.25], np.float32),
        prompt_top,
        np.array([[-0.125]], np.float32),
        (np.array([[5]]), np.array([[-0.75]], np.float32)),
    )
    sampled = deserialize_sample_response(output.as_proto())
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in sampled.sequences] == [
        ([7], [-0.5], "stop"),
        ([8, 9], [-1.0, -2.0], "length"),
    ]
    assert sampled.sequences[0].topk_logprobs == [[(3, -0.5), (4, -1.5)]]
    assert sampled.prompt_logprobs == [None, -0.25]
    assert sampled.topk_prompt_logprobs == [None, [(1, -1.0), (2, -2.0)]]
    assert sampled.target_prompt_logprobs.tolist() == [[-0.125]]
    assert sampled.prompt_alt_tokens.tokens.tolist() == [[5]]
    told = output.as_json()
    assert told["prompt_logprobs"] == [None, -0.25] and told["topk_prompt_logprobs"][0] is None
