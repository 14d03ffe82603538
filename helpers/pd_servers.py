"""Prefill and decode on different vLLM engines: pairs of servers as context managers, and a small router in front of them.

``with PDPair(folder, link="nixl") as pair:`` starts two servers at once, joined by NIXL over host memory (on a GPU: over GPU
memory) or by a shared folder, and ends both whatever happens. ``with Router(route, pair.urls) as router:`` serves a routing
function of the notebook's own over HTTP, so that the course's client measures it like any server.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from helpers.engines.base import EngineInfo
from helpers.engines.http_handler import JsonHandler, serve
from helpers.engines.openai_client import OpenAIEngine, parse_counters
from helpers.engines.server_process import HOST, ServerOwner, ServerProcess, claim_port, free_port
from helpers.engines.vllm_cli import vllm_version
from helpers.engines.vllm_settings import vllm_environment
from helpers.errors import EngineError
from helpers.hardware import describe

Link = Literal["nixl", "folder", "none"]
ROLES = ("prefill", "decode")
REMEDY = "Start the pair again, and check that nothing else ended it."


def refusal(link: Link) -> str | None:
    """Why a link cannot be used here, in one sentence, or None where it can."""
    capability = describe().capabilities["vllm"]
    if not capability.available:
        return capability.reason
    if link == "nixl" and importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed (the wheels nixl and nixl-cu12, Linux only)"
    return None


def transfer_config(link: Link, role: str, folder: Path | None = None) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config`` of one end of a link."""
    if link == "none":
        return None
    if link == "nixl":
        device = describe().device
        # A short lease: blocks that nobody fetches come back soon.
        extra = {"kv_lease_duration": 30}
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": device,
            "kv_connector_extra_config": extra,
        }
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


# -- asking a server ------------------------------------------------------------------------------------------------
def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or HOST, parts.port, timeout=timeout_s)


def _unreachable(url: str, error: Exception) -> EngineError:
    if isinstance(error, ConnectionRefusedError):
        return EngineError(f"Nobody listens at {url}: the connection was refused.", REMEDY)
    if isinstance(error, TimeoutError):
        return EngineError(f"The server at {url} did not answer in time.", REMEDY)
    return EngineError(f"The server at {url} broke off: {type(error).__name__}: {error}", REMEDY)


def _told(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
    """GET `path`, or POST `body` to it; the JSON that comes back (text for ``/metrics``).

    Raises
    ------
    EngineError : the server is not there, broke off in the middle, took too long, or refused (with what it said).
    """
    connection = _connection(url, timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    finally:
        connection.close()
    if response.status != 200:
        raise EngineError(f"The server at {url} refused the request: {_told(raw)}", REMEDY)
    return raw.decode() if path == "/metrics" else json.loads(raw)


def stream(url: str, body: Mapping[str, Any], *, timeout_s: float = 60.0) -> Iterator[dict[str, Any]]:
    """POST a completion with ``stream`` set and yield its chunks as they come.

    Raises
    ------
    EngineError : as `ask`; also where the stream ends without its last mark (``[DONE]``), or says that it failed.
    """
    connection = _connection(url, timeout_s)
    try:
        try:
            data = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(f"The server at {url} refused the request: {_told(response.read())}", REMEDY)
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise EngineError(f"The server at {url} gave up: {chunk['error']['message']}", REMEDY)
                    yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(url, error) from error
        raise EngineError(f"The server at {url} broke off: its stream ended before it was complete.", REMEDY)
    finally:
        connection.close()


# -- servers --------------------------------------------------------------------------------------------------------
class PDServer(ServerOwner):
    """``with PDServer(folder, role="prefill", link="nixl") as server:``: one engine in one process, with a KV connector.

    Parameters
    ----------
    model_path : a model folder in Hugging Face's layout.
    role : ``prefill`` or ``decode``; only the shared folder treats them differently.
    link : ``nixl``, ``folder`` or ``none``.
    folder : the shared folder, for that link.
    port : None takes a free one; a taken one is refused with a message.
    num_kv_blocks, block_size : the KV pool.
    device_index : which GPU, on a machine with several.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        role: str = "prefill",
        link: Link = "nixl",
        folder: Path | None = None,
        port: int | None = None,
        name: str = "model",
        dtype: str = "bfloat16",
        max_model_len: int = 1024,
        block_size: int = 32,
        num_kv_blocks: int = 64,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        threads: int = 1,
        device_index: int = 0,
        startup_timeout_s: float = 120.0,
    ) -> None:
        if (reason := refusal(link)) is not None:
            raise EngineError(f"A {link} link cannot be used here: {reason}.", "Install requirements/cpu.txt on Linux.")
        self.role, self.link, self.name, self.dtype = role, link, name, dtype
        self.model_path, self.folder, self.port = Path(model_path), folder, port
        self.max_model_len, self.block_size, self.num_kv_blocks = max_model_len, block_size, num_kv_blocks
        self.threads, self.device_index, self.startup_timeout_s = threads, device_index, startup_timeout_s
        self._llm: dict[str, Any] = {
            "model": str(self.model_path),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "num_gpu_blocks_override": num_kv_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens or max(max_model_len, max_num_seqs),
            "enable_prefix_caching": enable_prefix_caching,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": 0,
            "async_scheduling": False,
        }
        if (n_gpus := len(describe().gpus)) > 0:
            self._llm["gpu_memory_utilization"] = 0.85 if n_gpus > 1 else 0.4  # one GPU holds both engines
        self.title = f"the {role} server"

    def __enter__(self) -> Self:
        port = claim_port(self.port)
        llm = {**self._llm, "kv_transfer_config": transfer_config(self.link, self.role, self.folder)}
        settings = {
            "port": port,
            "name": self.name,
            "max_model_len": self.max_model_len,
            "version": vllm_version(),
            "patient": self.link == "nixl" and describe().device == "cpu",
            "llm": {key: value for key, value in llm.items() if value is not None},
        }
        self._process = ServerProcess(
            self.title,
            ["helpers.engines.pd_server", json.dumps(settings)],
            port=port,
            env=self._environment(),
            startup_timeout_s=self.startup_timeout_s,
        ).__enter__()
        return self

    def _environment(self) -> dict[str, str]:
        device = describe().device
        env = vllm_environment(device, threads=self.threads) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "NIXL_LOG_LEVEL": "ERROR",
            "UCX_LOG_LEVEL": "error",
        }
        if device == "cpu":
            env["UCX_TLS"] = os.environ.get(
                "UCX_TLS", "tcp,self"
            )  # not shared memory: a network is what is to be shown
        else:
            mine = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            env["CUDA_VISIBLE_DEVICES"] = mine[self.device_index % len(mine)] if mine else str(self.device_index)
        return env

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def info(self) -> EngineInfo:
        """What runs, for records. The name is not ``vllm``: a client across a socket can lag, and is checked for it."""
        return EngineInfo(
            engine="vllm-pd",
            version=vllm_version() or "unknown",
            model=self.name,
            dtype=self.dtype,
            device=describe().device,
            max_model_len=self.max_model_len,
            settings={"link": self.link, "block_size": self.block_size, "num_kv_blocks": self.num_kv_blocks},
        )

    def counters(self) -> dict[str, float]:
        """vLLM's counters, by the name that its code gives them."""
        return parse_counters(ask(self.url, "/metrics"))

    def control(self, **changes: Any) -> dict[str, Any]:
        """``max_num_batched_tokens=n`` bounds a step; ``forget=True`` drops cached prefixes and the log of steps."""
        return dict(ask(self.url, "/control", changes))

    def steps(self) -> list[tuple[float, float, list[tuple[int, int]]]]:
        """Each step since the last ``forget``: (began, seconds, [(position of the first token, tokens), ...])."""
        rows = ask(self.url, "/steps")
        return [(began, seconds, [(start, n) for start, n in spans]) for began, seconds, spans in rows]

    def resident_bytes(self) -> int:
        return int(ask(self.url, "/memory")["resident"])


class PDPair:
    """Two servers, started at the same time and ended together; `prefill` and `decode` are `PDServer` objects.

    Parameters
    ----------
    model_path, options : as of `PDServer`.
    link : ``nixl``, ``folder`` or ``none``. A shared folder is made for the pair and removed with it.
    """

    def __init__(self, model_path: Path | str, *, link: Link = "nixl", **options: Any) -> None:
        self.link: Link = link
        self._arguments = (model_path, options)
        self._stack = contextlib.ExitStack()
        self.folder: Path | None = None
        self.servers: dict[str, PDServer] = {}

    def __enter__(self) -> Self:
        model_path, options = self._arguments
        try:
            if self.link == "folder":
                self.folder = Path(tempfile.mkdtemp(prefix="kv-folder-"))
                self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            gpus = max(1, len(describe().gpus))
            for index, role in enumerate(ROLES):
                given = {"role": role, "link": self.link, "folder": self.folder, "device_index": index % gpus}
                self.servers[role] = PDServer(model_path, **{**options, **given})
            # Both are entered in threads of their own; whoever came up is in the stack before an error is raised.
            with ThreadPoolExecutor(len(ROLES)) as pool:
                starting = [pool.submit(self._enter, self.servers[role]) for role in ROLES]
            for future in starting:
                future.result()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _enter(self, server: PDServer) -> None:
        server.__enter__()
        self._stack.push(server)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def prefill(self) -> PDServer:
        return self.servers["prefill"]

    @property
    def decode(self) -> PDServer:
        return self.servers["decode"]

    @property
    def urls(self) -> list[str]:
        return [self.prefill.url, self.decode.url]

    @property
    def pids(self) -> list[int]:
        return [server.pid for server in self.servers.values()]

    def forget(self) -> None:
        """Drop cached prefixes and logs of steps on both servers."""
        for server in self.servers.values():
            server.control(forget=True)


# -- a router --------------------------------------------------------------------------------------------------------
Route = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]


class Router:
    """``with Router(route, name="model", counted=urls) as router, router.engine() as engine:`` serves `route` over HTTP.

    Parameters
    ----------
    route : takes a completion request's body and yields the chunks of its answer; `EngineError` becomes an error in the
        stream, and the client reads a failed request instead of waiting.
    name, max_model_len : what ``/v1/models`` says.
    counted : servers whose counters ``/metrics`` adds up.
    """

    def __init__(
        self,
        route: Route,
        *,
        name: str = "model",
        max_model_len: int = 1024,
        counted: Sequence[str] = (),
        port: int | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        self.route, self.name, self.max_model_len = route, name, max_model_len
        self.counted, self.port, self.info = list(counted), port, info
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        router = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.reply(200, router.counters_page(), "text/plain")
                elif self.path == "/v1/models":
                    self.reply(200, {"data": [{"id": router.name, "max_model_len": router.max_model_len}]})
                else:
                    self.reply(200, {})

            def do_POST(self) -> None:
                if (body := self.body()) is None:
                    return
                self.begin_stream()
                with contextlib.suppress(OSError):
                    try:
                        for chunk in router.route(body):
                            self.event(chunk)
                    except EngineError as error:
                        self.event({"error": {"message": str(error)}})
                    self.end_stream()

        self._server = serve(Handler, claim_port(self.port), "router")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        if self._server is None:
            raise EngineError("The router is not running.", "Use it inside its 'with' block.")
        return f"http://{HOST}:{self._server.server_address[1]}"

    def counters_page(self) -> str:
        """The counted servers' counters added up, as a Prometheus page."""
        total: dict[str, float] = {}
        for url in self.counted:
            for name, value in parse_counters(ask(url, "/metrics")).items():
                total[name] = total.get(name, 0.0) + value
        lines = []
        for name, value in total.items():
            head, _, labels = name.partition("{")
            pairs = [pair.partition("=") for pair in labels.rstrip("}").split(",") if pair]
            shown = "{" + ",".join(f'{key}="{text}"' for key, _, text in pairs) + "}" if pairs else ""
            lines += [f"# TYPE {head} counter", f"{head}_total{shown} {value}"]
        return "\n".join(lines) + "\n"

    def engine(self, **options: Any) -> OpenAIEngine:
        """The course's client for this router."""
        return OpenAIEngine(self.url, self.name, info=self.info, **options)
