"""Checkpoints: exact, named, listed, expired, deleted, downloaded; and there after the server is gone."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tinker_server import KEY, Served, datum, drop

from rllm.errors import UserError
from rllm.serve.tinker.store import FOLDERS, Store


def step(sdk: Any, training: Any, start: int) -> float:
    """One optimizer step on a row; its loss."""
    future = training.forward_backward([datum(sdk, range(start, start + 20), weights=[1.0] * 19)], "cross_entropy")
    training.optim_step(sdk.AdamParams(learning_rate=1e-2)).result(timeout=60)
    return future.result(timeout=60).metrics["loss:sum"]


def test_a_run_goes_on_from_a_checkpoint_exactly(sdk: Any, client: Any, served: Served, training: Any) -> None:
    step(sdk, training, 30)
    saved = training.save_state("exact").result(timeout=60).path
    straight = [step(sdk, training, start) for start in (40, 50, 60)]
    resumed = client.create_training_client_from_state_with_optimizer(saved).result(timeout=60)
    assert [step(sdk, resumed, start) for start in (40, 50, 60)] == straight
    one, other = (served.service.runs[t.model_id].learner.trainable() for t in (training, resumed))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    fresh = client.create_training_client_from_state(saved).result(timeout=60)
    without = [step(sdk, fresh, start) for start in (40, 50, 60)]
    assert without[0] == straight[0] and without[1] != straight[1]


def test_the_older_way_of_loading_into_a_run_is_exact_too(sdk: Any, served: Served, client: Any, training: Any) -> None:
    saved = training.save_state("older").result(timeout=60).path
    straight = step(sdk, training, 40)
    other = client.create_lora_training_client("default", rank=4, seed=9).result(timeout=30)
    step(sdk, other, 90)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert other.load_state_with_optimizer(saved).result(timeout=60).path == saved
    assert step(sdk, other, 40) == straight


def test_a_name_is_taken_unless_it_is_to_be_overwritten(sdk: Any, client: Any, served: Served, training: Any) -> None:
    path = training.save_state("again", user_metadata={"a": "1"}).result(timeout=60).path
    folder = served.service.store.get(path).folder
    with pytest.raises(Exception, match="exists; choose another name"):
        training.save_state("again").result(timeout=60)
    step(sdk, training, 40)
    assert training.save_state("again", overwrite=True).result(timeout=60).path == path
    assert not folder.exists() and served.service.store.get(path).about["user_metadata"] is None


def test_an_adapter_is_a_peft_folder_that_gives_the_same_logits(
    sdk: Any, client: Any, served: Served, training: Any
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from rllm.backends.local.loading import DEFAULT_MODEL

    path = training.save_weights_for_sampler("peft").result(timeout=60).path
    folder = served.service.store.get(path).folder
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32.0)
    sampler = client.create_sampling_client(model_path=path).result(timeout=30)
    ids = list(range(50, 70))
    told = sampler.compute_logprobs(sdk.ModelInput.from_ints(ids)).result(timeout=60)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
        logits = PeftModel.from_pretrained(base, str(folder)).eval()(torch.tensor([ids])).logits[0]
    wanted = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert (torch.tensor(told[1:]) - wanted).abs().max() < 1e-4


def test_listings_show_what_was_saved(sdk: Any, client: Any, served: Served, training: Any) -> None:
    rest = sdk.RestClient(base_url=served.url, api_key=KEY)
    state = training.save_state("one", user_metadata={"note": "x"}).result(timeout=60).path
    weights = training.save_weights_for_sampler("two", ttl_seconds=7200).result(timeout=60).path
    training.save_weights_and_get_sampling_client().result(timeout=60)
    listed = rest.list_checkpoints(training.model_id).result(timeout=20).checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.tinker_path) for c in listed] == [
        ("weights/one", "training", state),
        ("sampler_weights/two", "sampler", weights),
    ]
    assert listed[0].user_metadata == {"note": "x"} and listed[0].expires_at is None and listed[1].expires_at
    assert all(c.size_bytes and c.size_bytes > 1000 for c in listed)
    run = rest.get_training_run(training.model_id).result(timeout=20)
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("default", 4, state)
    assert run.last_sampler_checkpoint.tinker_path == weights
    runs = rest.list_training_runs(limit=2).result(timeout=20)
    assert len(runs.training_runs) == 2 and runs.cursor.total_count >= 2
    everything = rest.list_user_checkpoints(limit=1000).result(timeout=20)
    assert {state, weights} <= {c.tinker_path for c in everything.checkpoints}
    info = rest.get_weights_info_by_tinker_path(state).result(timeout=20)
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("default", 4, True)
    session = training.model_id.partition(":")[0]
    assert training.model_id in rest.get_session(session).result(timeout=20).training_run_ids
    assert session in rest.list_sessions(limit=100).result(timeout=20).sessions


def test_checkpoints_are_published_expire_and_are_deleted(sdk: Any, client: Any, served: Served, training: Any) -> None:
    rest, store = sdk.RestClient(base_url=served.url, api_key=KEY), served.service.store
    path = training.save_weights_for_sampler("brief").result(timeout=60).path
    rest.publish_checkpoint_from_tinker_path(path).result(timeout=20)
    assert store.get(path).public
    rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=20)
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(timeout=20)
    assert not store.get(path).public and 3590 < (store.get(path).expires or 0) - time.time() < 3610
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(timeout=20)
    assert store.get(path).expires is None
    sampler = client.create_sampling_client(model_path=path).result(timeout=30)
    folder = store.get(path).folder
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=20)
    assert not folder.exists() and store.find(path) is None
    assert path not in served.service.backend.engine.adapters
    with pytest.raises(Exception, match="there is no checkpoint"):
        sampler.compute_logprobs(sdk.ModelInput.from_ints([1, 2])).result(timeout=20)
    short = training.save_weights_for_sampler("short").result(timeout=60).path
    folder = store.get(short).folder
    store.change(short, expires=time.time() - 1)
    assert store.find(short) is None and short in store.sweep() and not folder.exists()


def test_files_are_downloaded_by_signed_links(
    sdk: Any, client: Any, served: Served, training: Any, tmp_path: Path
) -> None:
    path = training.save_weights_external("out").result(timeout=60).path
    links = sdk.RestClient(base_url=served.url, api_key=KEY).get_external_weights_urls(path).result(timeout=20)
    folder = served.service.store.get(path).folder
    assert sorted(links.urls) == sorted(file.name for file in folder.iterdir())
    for name, url in links.urls.items():
        assert httpx.get(url).content == (folder / name).read_bytes()
    url = links.urls["adapter_config.json"]
    assert httpx.get(url.replace("adapter_config.json", "adapter_model.safetensors")).status_code == 403
    assert httpx.get(url.replace("expires=", "expires=9")).status_code == 403
    run = training.model_id
    answer = served.http.get(f"/training_runs/{run}/checkpoints/external_weights/out/archive")
    assert answer.status_code == 302
    with tarfile.open(fileobj=io.BytesIO(httpx.get(answer.headers["location"]).content)) as tar:
        assert sorted(tar.getnames()) == sorted(links.urls)


@pytest.mark.parametrize("name", ["..", "a/b", "", "a b", "x" * 129, ".hidden", "a\n", "ü"])
def test_a_name_that_could_leave_its_folder_is_refused(served: Served, name: str) -> None:
    model = served.model()
    answer = served.http.post("/save_weights", json={"model_id": model, "path": name, "seq_id": 1})
    assert answer.status_code == 400 and "cannot name a checkpoint" in answer.json()["error"]
    assert served.result(served.post("/save_weights", {"model_id": model, "path": "fine", "seq_id": 2}))["path"]


def test_after_a_restart_checkpoints_samplers_and_results_of_saves_are_there(
    sdk: Any, backend: Any, tmp_path: Path
) -> None:
    first = Served(backend, tmp_path)
    client = sdk.ServiceClient(base_url=first.url, api_key=KEY)
    training = client.create_lora_training_client("default", rank=2, seed=1).result(timeout=30)
    step(sdk, training, 30)
    saved, weights = (
        getattr(training, how)("kept").result(timeout=60).path for how in ("save_state", "save_weights_for_sampler")
    )
    named = client.create_sampling_client(model_path=weights).result(timeout=30)
    unnamed = training.save_weights_and_get_sampling_client().result(timeout=60)
    prompt = sdk.ModelInput.from_ints(list(range(9, 19)))
    wanted = named.compute_logprobs(prompt).result(timeout=60)
    straight = step(sdk, training, 40)
    reply = first.post("/save_weights", {"model_id": training.model_id, "path": "last"})
    told = first.result(reply)
    port = first.server.port
    first.close()
    drop(client)

    second = Served(backend, tmp_path)
    try:
        assert second.result(reply) == told
        other = sdk.ServiceClient(base_url=second.url, api_key=KEY)
        resumed = other.create_training_client_from_state_with_optimizer(saved).result(timeout=60)
        assert step(sdk, resumed, 40) == straight
        for sampler in (named, unnamed):  # as they are, by their ids
            body = {
                "sampling_session_id": sampler._sampling_session_id,
                "seq_id": 100,
                "prompt": {"chunks": [{"tokens": list(range(9, 19))}]},
                "sampling_params": {"max_tokens": 1},
                "prompt_logprobs": True,
            }
            assert second.result(second.post("/asample", body))["prompt_logprobs"] == pytest.approx(wanted, abs=1e-6)
        gone = second.http.post("/optim_step", json={"model_id": training.model_id, "adam_params": {}})
        assert gone.status_code == 404 and "/weights/last" in gone.json()["error"]
        assert port != second.server.port
        other.close("success").result(timeout=20)
    finally:
        second.close()


def test_a_save_that_was_cut_short_leaves_nothing_behind(tmp_path: Path) -> None:
    store = Store(tmp_path)
    about = {"rank": 1, "fingerprint": "f"}
    store.save("r", "weights", "a", lambda folder: (folder / "x").write_text("1") and None, about)

    def broken(folder: Path) -> None:
        (folder / "x").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save("r", "weights", "b", broken, about)
    kept = [folder.name for folder in (tmp_path / FOLDERS).iterdir()]
    (tmp_path / FOLDERS / "r.weights.c.12345678.partial").mkdir()
    shutil.copytree(tmp_path / FOLDERS / kept[0], tmp_path / FOLDERS / "r.weights.d.12345678")
    store.close()
    again = Store(tmp_path)
    assert [folder.name for folder in (tmp_path / FOLDERS).iterdir()] == kept
    assert [c.path for c in again.checkpoints()[0]] == ["tinker://r/weights/a"]
    again.close()


def test_two_servers_do_not_share_a_state_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    code = f"from pathlib import Path; from rllm.serve.tinker.store import Store; Store(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "is another server using this folder? Give --state another one" in done.stderr
    store.close()
    (tmp_path / "tinker.sqlite").write_text("not a database at all, but long enough to be looked at " * 20)
    for extra in ("-wal", "-shm"):
        (tmp_path / f"tinker.sqlite{extra}").unlink(missing_ok=True)
    with pytest.raises(UserError, match="is no database of this server"):
        Store(tmp_path)


def test_a_checkpoint_of_another_base_is_refused(sdk: Any, client: Any, served: Served, training: Any) -> None:
    path = training.save_state("foreign").result(timeout=60).path
    served.service.store._write(
        "update checkpoints set about = replace(about, ?, 'feedfeedfeedfeed') where path = ?",
        served.service.base["fingerprint"],
        path,
    )
    with pytest.raises(Exception, match="another base"):
        client.create_training_client_from_state(path).result(timeout=30)


def test_a_finished_session_ends_and_its_checkpoints_stay(served: Served) -> None:
    model = served.model()
    session = model.partition(":")[0]
    kept = served.result(served.post("/save_weights", {"model_id": model, "path": "kept"}))["path"]
    lost = served.result(served.post("/save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 0}))
    body = {"reason": {"type": "success"}, "detail": None}
    assert served.http.post(f"/sessions/{session}/finish", json=body).status_code == 204
    assert model not in served.service.runs and served.service.store.find(kept) is not None
    assert served.http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
    answer = served.http.post("/optim_step", json={"model_id": model, "adam_params": {}})
    assert answer.status_code == 410 and kept in answer.json()["error"]
    body = {"sampling_session_id": lost["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    assert served.http.post("/asample", json=body).status_code == 404


def test_a_session_of_which_nothing_is_heard_ends_by_itself(backend: Any, tmp_path: Path) -> None:
    server = Served(backend, tmp_path, session_silence_s=0.4)
    try:
        silent, alive = server.model(), server.model()
        deadline = time.monotonic() + 20
        while silent in server.service.runs and time.monotonic() < deadline:
            server.post("/session_heartbeat", {"session_id": alive.partition(":")[0]})
            time.sleep(0.05)
        assert set(server.service.runs) == {alive}
        answer = server.http.post("/get_info", json={"model_id": silent})
        assert answer.status_code == 200  # what is known of it stays
        assert server.http.post("/optim_step", json={"model_id": silent, "adam_params": {}}).status_code == 410
    finally:
        server.close()


def test_unnamed_weights_of_many_steps_do_not_pile_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.serve.tinker.service.UNNAMED_KEPT", 2)
    model, service, asked = served.model(rank=1), served.service, {"prompt": {"chunks": [{"tokens": [1, 2]}]}}
    samplers = []
    for number in range(6):
        body = {"model_id": model, "sampling_session_seq_id": number}
        samplers.append(served.result(served.post("/save_weights_for_sampler", body))["sampling_session_id"])
        if number == 0:
            served.result(served.post("/asample", {**asked, "sampling_session_id": samplers[0], "sampling_params": {}}))
        service.samplers.last_used = {
            path: when + 1e9 * (number == 5) for path, when in service.samplers.last_used.items()
        }
    names = [path.rpartition("/")[2] for path in service.store.hidden(model)]
    assert names == ["s0", "s4", "s5"]  # the one in use, and the newest
    gone = served.http.post("/asample", json={**asked, "sampling_session_id": samplers[1]})
    assert gone.status_code == 404 and "there is no checkpoint" in gone.json()["error"]
