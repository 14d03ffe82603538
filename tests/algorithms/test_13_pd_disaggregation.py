"""Notebook 13: transfers are exact and end in sentences, routes and servers end as they should, broken twins are caught."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from notebook_cells import answers, assert_names_what_broke, checked_functions, edited, tagged
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import exercises, kv_links, models, pd_servers
from helpers.engines.server_process import free_port
from helpers.errors import EngineError
from helpers.peers import Peer, source_of

NAME = "13_pd_disaggregation"
CAUGHT = (AssertionError, EngineError, ValueError, RuntimeError, KeyError, IndexError, struct.error, EOFError)


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


@pytest.fixture
def tiny_config():
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)


@pytest.fixture
def tiny(tiny_config):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config).eval()


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=n)


@torch.no_grad()
def through_both(nb, model, ids, n_tokens, by_layer, **options):
    """One request through a prefill and a decode instance, here two threads."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:

        def decode():
            with torch.no_grad():
                return nb.decode_instance(model, port, n_tokens, timeout_s=10.0)

        def prefill():
            with torch.no_grad():
                return nb.prefill_instance(model, ids, port, by_layer, **options)

        waiting, sent = pool.submit(decode), pool.submit(prefill)
        return {**sent.result(), **waiting.result()}


# -- the transport ---------------------------------------------------------------------------------------------------------
def receive_from(nb, pieces: list[bytes], n: int) -> bytes:
    ours, theirs = socket.socketpair()

    def send():
        for piece in pieces:
            theirs.sendall(piece)
            time.sleep(0.001)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        ours.settimeout(5)
        return bytes(nb.receive_exactly(ours, n))
    finally:
        sender.join()
        ours.close()


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [3, 7], [9, 1, 5]])
def test_receive_takes_exactly_what_was_asked_for(nb, sizes):
    data = bytes(range(sum(sizes)))
    pieces = [data[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    assert receive_from(nb, pieces, 10) == data[:10]


def test_receive_says_how_much_is_missing(nb):
    with pytest.raises(EngineError, match="after 7 of 10 bytes"):
        receive_from(nb, [b"1234", b"567"], 10)


def test_receive_ends_when_nothing_comes(nb):
    ours, theirs = socket.socketpair()
    ours.settimeout(0.1)
    started = time.monotonic()
    with ours, theirs, pytest.raises(EngineError, match="after 0 of 4 bytes"):
        nb.receive_exactly(ours, 4)
    assert time.monotonic() - started < 5


def test_a_refused_port_ends_in_a_sentence(nb):
    started = time.monotonic()
    with pytest.raises(EngineError, match="Nobody listens"):
        nb.connect_to(free_port(), patience_s=0.2)
    assert time.monotonic() - started < 5


def test_nobody_sends_ends_in_a_sentence(nb, tiny):
    with pytest.raises(EngineError, match=r"No prefill instance came within 0\.2 s"):
        nb.decode_instance(tiny, free_port(), 4, timeout_s=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_arrives_as_it_was_sent(nb, dtype):
    ours, theirs = socket.socketpair()
    keys, values = (torch.randn(1, 3, 11, 8).to(dtype).transpose(2, 3).contiguous().transpose(2, 3) for _ in "kv")
    pipe = nb.Pipe(theirs)
    pipe.send_layer(5, keys, values)
    layer, got_keys, got_values = nb.receive_layer(ours, 3, 8, dtype, 6)
    assert layer == 5 and torch.equal(got_keys, keys) and torch.equal(got_values, values)
    assert pipe.n_payload == 2 * 3 * 11 * 8 * dtype.itemsize and pipe.n_bytes == pipe.n_payload + 16


@pytest.mark.parametrize("shape", [(2, 8, 6), (3, 4, 6), (3, 8, 5)])
def test_another_model_is_refused(nb, shape):
    ours, theirs = socket.socketpair()
    nb.Pipe(theirs).send_layer(5, torch.zeros(1, 3, 11, 8), torch.zeros(1, 3, 11, 8))
    with pytest.raises(EngineError, match="Run the same model"):
        nb.receive_layer(ours, shape[0], shape[1], torch.float32, shape[2])


def test_a_pipe_keeps_its_bandwidth(nb):
    class Nowhere:
        def sendall(self, data):
            pass

    pipe, started = nb.Pipe(Nowhere(), bytes_per_second=1e5), time.monotonic()
    for _ in range(5):
        pipe.send(bytes(2000))
    assert 0.1 <= time.monotonic() - started < 1.0


# -- two instances ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("n", [1, 2, 17, 64])
def test_tokens_and_bytes(nb, tiny, by_layer, n):
    ids = prompt(n)
    with torch.no_grad():
        alone = nb.one_process(tiny, ids, 8)
    seen = through_both(nb, tiny, ids, 8, by_layer)
    assert seen["tokens"] == alone
    assert seen["bytes"] == models.kv_bytes(tiny.config, n, dtype="float32")
    assert seen["all bytes"] == seen["bytes"] + 16 * tiny.config.num_hidden_layers + 8
    assert seen["cached"] == n + 7


def test_hooks_are_gone_also_after_an_error(nb, tiny):
    class Broken:
        n_payload = n_bytes = 0

        def send_layer(self, *_):
            raise OSError("gone")

    before = threading.active_count()
    with torch.no_grad(), pytest.raises(OSError, match="gone"):
        nb.prefill_by_layer(tiny, prompt(5), Broken())
    assert not any(layer._forward_hooks for layer in tiny.model.layers)
    assert threading.active_count() == before


def test_layers_leave_while_others_are_computed(nb, tiny):
    """By layer, the first layer is sent before the last one is computed; whole, after it."""
    order = []

    class Watching:
        def send_layer(self, layer, keys, values):
            order.append(("sent", layer))

    last = tiny.model.layers[-1].register_forward_pre_hook(
        lambda *_: (time.sleep(0.3), order.append(("compute", 3)))[1]
    )
    with torch.no_grad():
        nb.prefill_by_layer(tiny, prompt(9), Watching())
        assert order.index(("sent", 0)) < order.index(("compute", 3)) < order.index(("sent", 3))
        order.clear()
        nb.prefill_whole(tiny, prompt(9), Watching())
    last.remove()
    assert order.index(("compute", 3)) < order.index(("sent", 0))
    assert [layer for what, layer in order if what == "sent"] == [0, 1, 2, 3]


TWINS = [
    ("torch.stack((keys, values))", "torch.stack((values, keys))"),
    (
        ".view(2, 1, n_kv_heads, n_tokens, head_dim)",
        ".view(2, 1, n_tokens, n_kv_heads, head_dim).transpose(2, 3)",
    ),
    ("*kv_adapter.layer_tensors(cache)[layer]", "*kv_adapter.layer_tensors(cache)[0]"),
    (
        "token, seconds = int(logits[0, -1].argmax()), time.monotonic() - started\n    finally",
        "token, seconds = int(logits[0, -1].argmin()), time.monotonic() - started\n    finally",
    ),
    ("range(shape.n_layers)", "range(shape.n_layers - 1)"),
    ("fed = torch.tensor([tokens[-1:]]", "fed = torch.tensor([tokens[:1]]"),
]


@pytest.mark.parametrize(("old", "new"), TWINS)
def test_broken_twins_of_the_transfer_are_caught(nb, tiny, load_algorithms, old, new):
    broken = load_algorithms(NAME, (old, new))
    ids = prompt(21)
    with torch.no_grad():
        alone = nb.one_process(tiny, ids, 8)
    assert through_both(nb, tiny, ids, 8, by_layer=True)["tokens"] == alone, "the unbroken one must pass here"
    try:
        seen = through_both(broken, tiny, ids, 8, by_layer=True)
    except CAUGHT:
        return
    assert seen["tokens"] != alone


SETUP = """
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
"""


@pytest.mark.engine
def test_two_processes_and_a_dead_sender(nb):
    """Two real processes; then the prefill one is killed in the middle of a slow transfer: a sentence, no hang, nobody left."""
    names = "receive_exactly connect_to Pipe receive_layer prefill_whole prefill_by_layer prefill_instance"
    cells = [getattr(nb, name) for name in f"{names} decode_instance one_process".split()]
    me = psutil.Process()
    with (
        Peer(cells, None, setup=SETUP) as first,
        Peer(cells, None, setup=SETUP) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        alone = first.do(nb.one_process, ids=prompt(40), n_tokens=6)
        for speed in (None, 5e3):
            port = free_port()
            waiting = pool.submit(second.do, nb.decode_instance, port=port, n_tokens=6, timeout_s=20.0)
            arguments = dict(ids=prompt(40), port=port, by_layer=True, bytes_per_second=speed)
            sending = pool.submit(first.do, nb.prefill_instance, **arguments)
            if speed:
                time.sleep(1.5)
                os.kill(first.pid, signal.SIGKILL)
                with pytest.raises(EngineError, match="broke"):
                    waiting.result(timeout=15)
                with pytest.raises(EngineError, match="died"):
                    sending.result(timeout=15)
            else:
                assert waiting.result()["tokens"] == alone and sending.result()["bytes"] > 0
    assert not [child for child in me.children(recursive=True) if "helpers.engines.child" in " ".join(child.cmdline())]


def test_the_source_of_a_class_of_a_cell_is_found(nb):
    assert source_of(nb.Pipe).startswith("class Pipe") and "def send_layer" in source_of(nb.Pipe)
    assert source_of(nb.connect_to) == inspect.getsource(nb.connect_to)


# -- formulas --------------------------------------------------------------------------------------------------------------
@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 40))
def test_layer_by_layer_is_the_pipeline(nb, compute, transfer, n):
    sent = done = 0.0
    for _ in range(n):
        done += compute / n
        sent = max(done, sent) + transfer / n
    assert nb.arrival_by_layer(compute, transfer, n) == pytest.approx(sent)
    assert max(compute, transfer) <= sent + 1e-9
    assert sent <= nb.arrival_whole(compute, transfer) + 1e-9


def test_one_layer_hides_nothing(nb):
    assert nb.arrival_by_layer(2.0, 3.0, 1) == nb.arrival_whole(2.0, 3.0)


@given(st.integers(1, 10**5), st.integers(1, 10**6), st.floats(1e9, 1e15))
def test_break_even_is_where_the_share_is_one(nb, n, kv_token, flops):
    needed = nb.prefill_flops(n, 1e9, 32, 32, 128)
    bandwidth = nb.break_even_bandwidth(n, kv_token, needed, flops)
    assert nb.transfer_share(n, kv_token, needed, flops, bandwidth) == pytest.approx(1)
    assert nb.transfer_share(n, kv_token, needed, flops, 2 * bandwidth) == pytest.approx(0.5)


def test_the_share_without_attention_does_not_depend_on_the_length(nb):
    shares = [nb.transfer_share(n, 1000, nb.prefill_flops(n, 1e9, 0, 0, 0), 1e12, 1e9) for n in (1, 100, 10**6)]
    assert shares == pytest.approx([shares[0]] * 3)


def test_prefill_flops_count_what_torch_counts(nb, tiny_config):
    """Matrix products of a real forward pass, by torch's own counter (which counts the whole square of attention)."""
    from torch.utils.flop_counter import FlopCounterMode

    n, c = 64, tiny_config
    tiny = LlamaForCausalLM._from_config(c, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tiny(torch.tensor([prompt(n)]), use_cache=False)
    weights = sum(p.numel() for name, p in tiny.named_parameters() if p.ndim == 2 and "embed" not in name)
    full_square = 2 * (nb.prefill_flops(n, 0, c.num_hidden_layers, c.num_attention_heads, 8))
    assert counter.get_total_flops() == pytest.approx(2 * weights * n + full_square, rel=0.02)


def test_hybrid_bytes_are_those_of_a_real_cache(nb):
    rows = nb.hybrid_sizes(None, [3, 40])
    assert all(row["tiny, counted"] == row["tiny, formula"] for row in rows)
    assert rows[0]["state"] == rows[1]["state"] and rows[1]["kv"] == rows[0]["kv"] * 40 // 3


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e11))
def test_the_link_model_finds_its_own_coefficients(nb, latency, bandwidth):
    rows = [
        (n, n * size, n * latency + n * size / bandwidth)
        for n, size in ((2048, 4096), (128, 65536), (8, 2**20), (1, 2**23))
    ]
    found = nb.fit_link(rows)
    assert found[0] == pytest.approx(latency, rel=1e-3, abs=1e-9) and found[1] == pytest.approx(bandwidth, rel=1e-3)


def test_128k_tokens_of_llama3_70b():
    config = SimpleNamespace(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, hidden_size=8192)
    assert models.kv_bytes(config, 128_000) == 41_943_040_000


# -- routes ----------------------------------------------------------------------------------------------------------------
RECEIPT = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_engine_id": "e"}


def test_a_route_apart_asks_for_one_token_and_hands_the_receipt_on(nb):
    asked, streamed = [], []

    def ask(url, path, body):
        asked.append((url, path, body))
        return {"kv_transfer_params": RECEIPT}

    def stream(url, body):
        streamed.append((url, body))
        yield {"choices": []}

    body = {"prompt": [1, 2], "max_tokens": 9, "stream": True}
    assert list(nb.apart("P", "D", ask, stream)(body)) == [{"choices": []}]
    ((url, path, first),) = asked
    assert (url, path, first["max_tokens"], first["stream"]) == ("P", "/v1/completions", 1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert streamed == [("D", {**body, "kv_transfer_params": RECEIPT})]
    assert body == {"prompt": [1, 2], "max_tokens": 9, "stream": True}, "the caller's body was changed"


@pytest.mark.parametrize("receipt", [None, {}, {"remote_block_ids": None}, {"remote_block_ids": []}])
def test_no_receipt_no_silent_recomputation(nb, receipt):
    route = nb.apart("P", "D", lambda *_: {"kv_transfer_params": receipt}, lambda *_: iter([{}]))
    with pytest.raises(EngineError, match="no receipt"):
        list(route({"prompt": [1]}))


def test_together_takes_turns(nb):
    seen = []
    route = nb.together(["a", "b"], lambda url, body: iter([seen.append(url)]))
    for _ in range(5):
        list(route({}))
    assert seen == ["a", "b", "a", "b", "a"]


def test_an_error_of_a_route_reaches_the_client_as_a_failed_request():
    from helpers.workload import single

    def route(body):
        yield {"choices": [{"index": 0, "text": "", "token_ids": [1], "finish_reason": None}], "usage": None}
        raise EngineError("The decode server is gone.", "Start it.")

    with pd_servers.Router(route, name="m") as router, router.engine() as engine:
        record = engine.run(single([1, 2, 3], 4), warmup=0)
    assert record.traces[0].error is not None and "decode server is gone" in record.traces[0].error


def test_a_refused_port_and_a_stream_that_ends_early():
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match="refused"):
        pd_servers.ask(nowhere, "/health")
    with pytest.raises(EngineError, match="refused"):
        list(pd_servers.stream(nowhere, {}))

    def serve(server):
        connection, _ = server.accept()
        asked = b""
        while not asked.endswith(b"}"):  # head and body may come apart; closing with half of them unread would reset
            asked += connection.recv(65536)
        connection.sendall(b'HTTP/1.0 200 OK\r\n\r\ndata: {"choices": []}\n\n')
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        chunks = pd_servers.stream(f"http://127.0.0.1:{server.getsockname()[1]}", {"prompt": [1]}, timeout_s=5)
        assert next(chunks) == {"choices": []}
        with pytest.raises(EngineError, match="before it was complete"):
            next(chunks)


def test_a_silent_server_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngineError, match="in time"):
            pd_servers.ask(url, "/health", timeout_s=0.2)


def test_a_taken_port_is_refused_before_anything_starts():
    if pd_servers.refusal("none"):
        pytest.skip(pd_servers.refusal("none"))
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(EngineError, match="cannot be used"):
        pd_servers.PDServer("folder", link="none", port=server.getsockname()[1]).__enter__()


# -- the control -----------------------------------------------------------------------------------------------------------
def test_corruption_keeps_the_file_readable_or_breaks_it(nb, tmp_path):
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    file = tmp_path / "a" / "layer.safetensors"
    file.parent.mkdir()
    save_file({"kv_cache": torch.randn(4, 6)}, file)
    assert nb.corrupt(tmp_path, "zero") == 1
    assert load_file(file)["kv_cache"].shape == (4, 6) and not load_file(file)["kv_cache"].any()
    nb.corrupt(tmp_path, "cut")
    with pytest.raises(SafetensorError):
        load_file(file)


# -- links and real servers ------------------------------------------------------------------------------------------------
@pytest.mark.engine
@pytest.mark.parametrize("link", kv_links.LINKS)
def test_a_link_delivers_every_block(link):
    if reason := kv_links.refusal(link):
        with pytest.raises(EngineError, match="cannot be measured"):
            kv_links.measure(link, [4096])
        pytest.skip(reason)
    rows = kv_links.measure(link, [4096, 65536], 2**19, repeats=2)
    assert [(row.block_bytes, row.n_blocks) for row in rows] == [(4096, 128), (65536, 8)]
    assert all(row.seconds > 0 for row in rows)


SIZES = dict(name="m", max_model_len=256, num_kv_blocks=24, max_num_seqs=4)


@pytest.mark.engine
@pytest.mark.parametrize("link", ["nixl", "folder"])
def test_a_pair_hands_over_and_leaves_nobody(nb, link):
    if reason := pd_servers.refusal(link):
        pytest.skip(reason)
    body = {"prompt": list(range(900, 1000)), "max_tokens": 8, "ignore_eos": True}
    with pd_servers.PDPair(models.locate(models.BUNDLED), link=link, dtype="bfloat16", **SIZES) as pair:
        pids, folder = pair.pids, pair.folder
        alone = pd_servers.ask(pair.prefill.url, "/v1/completions", body)["choices"][0]["token_ids"]
        before = pair.decode.counters()
        pair.decode.control(forget=True)
        if link == "nixl":
            chunks = list(nb.apart(*pair.urls, pd_servers.ask, pd_servers.stream)(body))
        else:
            chunks = list(pd_servers.stream(pair.decode.url, body))
        assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == alone
        ran = sum(n for _, _, spans in pair.decode.steps() for _, n in spans)
        assert ran == {"nixl": 1, "folder": 4}[link] + 7  # positions of the prompt, then seven tokens fed back
        after = pair.decode.counters()
        name = "vllm:prompt_tokens_by_source{source=%s}"
        grown = {s: after[name % s] - before.get(name % s, 0) for s in ("local_compute", "external_kv_transfer")}
        assert grown == (
            {"local_compute": 0, "external_kv_transfer": 100}
            if link == "nixl"
            else {"local_compute": 4, "external_kv_transfer": 96}
        )
        with pytest.raises(EngineError, match="token ids"):
            pd_servers.ask(pair.decode.url, "/v1/completions", {"prompt": "a text"})
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert folder is None or not folder.exists()


@pytest.mark.engine
def test_a_pair_that_cannot_start_leaves_nobody():
    if reason := pd_servers.refusal("none"):
        pytest.skip(reason)
    me = psutil.Process()
    with pytest.raises(EngineError, match="before it was ready"), pd_servers.PDPair("/nowhere", link="none", **SIZES):
        pass
    assert not [child for child in me.children(recursive=True) if "pd_server" in " ".join(child.cmdline())]


@pytest.mark.engine
def test_an_interrupt_in_the_block_ends_both_servers():
    if reason := pd_servers.refusal("none"):
        pytest.skip(reason)
    pids = []
    with (
        pytest.raises(KeyboardInterrupt),
        pd_servers.PDPair(models.locate(models.BUNDLED), link="none", **SIZES) as pair,
    ):
        pids += pair.pids
        raise KeyboardInterrupt
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


STARTS_A_PAIR = """
import json, sys, time
from helpers import pd_servers
pair = pd_servers.PDPair(sys.argv[1], link="none", dtype="bfloat16", **json.loads(sys.argv[2])).__enter__()
print(*pair.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.engine
def test_a_killed_kernel_leaves_no_server():
    if reason := pd_servers.refusal("none"):
        pytest.skip(reason)
    command = [sys.executable, "-c", STARTS_A_PAIR, str(models.locate(models.BUNDLED)), json.dumps(SIZES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kernel:
        pids = [int(pid) for pid in kernel.stdout.readline().split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        kernel.kill()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


# -- exercises -------------------------------------------------------------------------------------------------------------
NUMBERS = [f"13.{i}" for i in range(1, 6)]


def test_every_exercise_has_a_check():
    assert sorted(checked_functions(NAME)) == NUMBERS == exercises.known("13")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_untouched_exercise_is_not_attempted_and_its_solution_passes(number):
    function = checked_functions(NAME)[number]
    assert exercises.check(number, answers(NAME, "exercise")[function]).state == "not attempted"
    result = exercises.check(number, answers(NAME, "solution")[function])
    assert result.state == "pass", result.message


WRONG = [
    ("13.1", "-(-n_prompt // block_size)", "n_prompt // block_size", "blocks travel whole"),
    ("13.1", "- n_kept // block_size", "- -(-n_kept // block_size)", "kept in part travels"),
    ("13.1", "blocks * block_size * kv_token", "(n_prompt - n_kept) * kv_token", "bytes"),
    ("13.2", "max(computed, sent) + t", "computed + t", "busy from the first layer on"),
    ("13.2", "max(computed, sent) + t", "sent + t", "one layer"),
    ("13.3", "    while left:\n", "    for _ in range(2):\n", ""),
    ("13.3", "read(left)", "read(n_bytes)", "next message"),
    (
        "13.3",
        'raise EOFError(f"{left} of {n_bytes} bytes are missing")',
        "return bytes(n_bytes)",
        "gone raises EOFError",
    ),
    ("13.4", "min(p * prefill_rate, d * decode_rate)", "max(p * prefill_rate, d * decode_rate)", "n_prefill"),
    ("13.4", "-(p * prefill_price + d * decode_price)", "p * prefill_price + d * decode_price", "not spent"),
    ("13.5", "max(sum(compute[:n]), sum(fetch[n:]))", "sum(compute[:n]) + sum(fetch[n:])", ""),
    ("13.5", "range(len(compute) + 1)", "range(len(compute))", "compute everything"),
    ("13.5", "seconds < best[1]", "seconds <= best[1]", ""),
    ("13.5", "sum(fetch[n:])", "sum(fetch[: len(fetch) - n])", "from the back"),
]


@pytest.mark.parametrize(("number", "old", "new", "words"), WRONG)
def test_a_wrong_answer_is_told_what_broke(number, old, new, words):
    assert_names_what_broke(exercises.check(number, edited(NAME, number, (old, new))), words)


def test_the_bug_of_13_3_is_green_where_everything_comes_in_one_piece():
    buggy = answers(NAME, "exercise")["buggy_receive"]
    assert buggy(lambda n: b"abc"[:n], 3) == b"abc"
    assert_names_what_broke(exercises.check("13.3", buggy), "in pieces")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", [3, "a text", [], (None,), {}, float("nan")])
def test_an_answer_of_another_kind_fails_and_names_the_input(number, value):
    assert_names_what_broke(exercises.check(number, lambda *_, **__: value), "")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_error_in_an_answer_shows_the_input(number):
    def answer(*_, **__):
        raise KeyError("mine")

    result = exercises.check(number, answer)
    assert_names_what_broke(result, "")
    assert "KeyError: 'mine'" in result.message


def test_the_notebook_starts_no_engine_at_import():
    """Cells that start engines are no algorithm cells."""
    assert not any("PDPair(" in source or "Peer(" in source for source in tagged(NAME, "algorithm"))
