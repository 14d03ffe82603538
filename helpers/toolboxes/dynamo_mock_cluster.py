"""Runs inside the toolbox ``cluster``: Dynamo's real front end and router on loopback, over mock engines that only sleep.

Input: ``model`` (folder with a tokenizer), ``workers``, ``block_size``, ``blocks`` (of each engine), ``routers`` (``kv``,
``round-robin`` ...), ``prompts`` (pairs: group, text; sent one after another), ``max_tokens``, ``start_s`` (deadline to be
ready).

Output: ``versions``, and for each router ``requests``: group, prompt tokens, number of the worker, the router's own hit rate
(None where it has none) and seconds to the first token as the front end reports them; and ``metrics``: what the front end
counts about cache hits.

Three processes take part: this one, a front end, and one with the mock workers. Events go through a broker that is bound to
127.0.0.1 here, because the publishers themselves would listen on all interfaces. All of them die with the process that
started this one, also when it is killed.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
COUNTED = ("kv_hit_rate", "cached_tokens", "input_sequence_tokens")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on, from those that no outgoing connection is given."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def start_broker() -> str:
    """Start the event broker in a thread; returns its address as Dynamo wants it."""
    import zmq

    context: Any = zmq.Context.instance()
    inside, outside = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    ports = [side.bind_to_random_port(f"tcp://{HOST}") for side in (inside, outside)]
    threading.Thread(target=zmq.proxy, args=(inside, outside), daemon=True).start()
    return f"xsub=tcp://{HOST}:{ports[0]} , xpub=tcp://{HOST}:{ports[1]}"


def die_with_parent() -> None:
    """On Linux: this process gets SIGKILL when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def get(port: int, path: str) -> str:
    """A page of the front end as text."""
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def complete(port: int, model: str, text: str, max_tokens: int) -> Any:
    """One completion, with the worker and the timing that Dynamo adds if asked."""
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
    body["nvext"] = {"extra_fields": ["worker_id", "timing"]}
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def wait_until_ready(port: int, given: dict, processes: list, folder: Path) -> None:
    """Until all workers answer for the model, or end with the reason."""
    deadline = time.monotonic() + given["start_s"]
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            if given["model"] in get(port, "/v1/models"):
                complete(port, given["model"], "ready?", 1)
                return
        except (OSError, urllib.error.HTTPError):
            pass
        time.sleep(0.1)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.log")))
    ended = [process.args[2] for process in processes if process.poll() is not None]
    what = f"{', '.join(ended)} ended" if ended else f"nobody answered within {given['start_s']} s"
    raise SystemExit(f"The mock cluster did not start: {what}. Its logs end with:\n{logs}")


def counters(page: str) -> dict:
    """The counters of a Prometheus page whose names hold one of the words COUNTED, summed over their labels."""
    found: dict = {}
    for line in page.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if not line.startswith("#") and name.endswith(("_sum", "_count", "_total")) and any(c in name for c in COUNTED):
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def serve(router: str, given: dict, broker: str) -> dict:
    """Start a cluster with this router, send the prompts, read the counters, end everything."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, port, processes = Path(name), free_port(), []
        (folder / "kv").mkdir()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn", "DYN_FILE_KV": str(folder / "kv")}
        environment |= {"DYN_TCP_RPC_HOST": HOST, "DYN_TCP_RESPONSE_STREAM_HOST": "lo", "DYN_SELF_HOST_METADATA": "0"}
        environment |= {"DYN_ZMQ_BROKER_URL": broker}
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        size = str(given["block_size"])
        front = ["frontend", "--http-host", HOST, "--http-port", str(port), "--router-mode", router]
        front += ["--kv-cache-block-size", size]
        mock = ["mocker", "--model-path", given["model"], "--num-workers", str(given["workers"]), "--block-size", size]
        mock += ["--num-gpu-blocks-override", str(given["blocks"])]
        try:
            for role, *options in (front, mock):
                with (folder / f"{role}.log").open("w") as log:
                    command = [sys.executable, "-m", f"dynamo.{role}", *options, *planes]
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                            preexec_fn=die_with_parent,
                        )
                    )
            wait_until_ready(port, given, processes, folder)
            before = counters(get(port, "/metrics"))
            rows: list[list[Any]] = []
            numbers: dict[int, int] = {}
            for group, text in given["prompts"]:
                answer = complete(port, given["model"], text, given["max_tokens"])
                extra = answer.get("nvext") or {}
                timing, worker = extra.get("timing") or {}, (extra.get("worker_id") or {}).get("decode_worker_id")
                number = None if worker is None else numbers.setdefault(worker, len(numbers))
                ttft = timing.get("ttft_ms")
                row = [group, answer["usage"]["prompt_tokens"], number, timing.get("kv_hit_rate")]
                rows.append([*row, None if ttft is None else ttft / 1e3])
            after = counters(get(port, "/metrics"))
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        metrics = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return {"router": router, "requests": rows, "metrics": metrics}


def main(given: dict) -> dict:
    """Each router in a cluster of its own."""
    die_with_parent()
    broker = start_broker()
    runs = [serve(router, given, broker) for router in given["routers"]]
    return {"versions": {"ai-dynamo": importlib.metadata.version("ai-dynamo")}, "runs": runs}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given_file:
        output = main(json.load(given_file))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
