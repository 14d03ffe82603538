"""How fast blocks of memory move from one process to another: plain TCP, NIXL and Mooncake's transfer engine, by block size.

`measure` starts two children, a target that owns an empty buffer and a source that fills it block by block, and takes the
clock of the source, until the target says that the bytes are there (Mooncake: until its own call returns). The time of NIXL
holds the making of its descriptor lists. After each size bytes are compared at the target: a transfer that loses or swaps
blocks raises.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import zlib
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from helpers.engines.processes import child_environment, end_family, end_with_parent
from helpers.errors import EngineError

LinkName = Literal["TCP socket", "NIXL", "Mooncake"]
LINKS: tuple[LinkName, ...] = ("TCP socket", "NIXL", "Mooncake")
MODULES: dict[str, str | None] = {"TCP socket": None, "NIXL": "nixl", "Mooncake": "mooncake"}
HINTS = {
    "Mooncake": "; pip has mooncake-transfer-engine-non-cuda, which needs the system's libibverbs, librdmacm and libnuma"
}


class TransferTime(BaseModel):
    """One size of block over one link."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    link: str
    block_bytes: int
    n_blocks: int
    seconds: float
    """The fastest of the repeats."""
    all_seconds: list[float]

    @property
    def bytes_per_second(self) -> float:
        return self.block_bytes * self.n_blocks / self.seconds


def refusal(link: LinkName) -> str | None:
    """Why a link cannot be measured here, in one sentence, or None where it can."""
    module = MODULES[link]
    if module is not None and importlib.util.find_spec(module) is None:
        return f"the package {module!r} is not installed{HINTS.get(link, '')}"
    return None


def measure(
    link: LinkName, block_bytes: list[int], total_bytes: int = 2**23, repeats: int = 3, timeout_s: float = 60.0
) -> list[TransferTime]:
    """Move `total_bytes` in blocks of each size; blocks lie scattered on both sides, every second place of a buffer.

    Raises
    ------
    EngineError : the link is not installed, a child died or hung, or bytes arrived wrong.
    """
    if reason := refusal(link):
        raise EngineError(f"{link} cannot be measured here: {reason}.", "Install it, or leave this link out.")
    # UCX would take shared memory between two processes of one machine; a network is what is to be shown.
    env = child_environment(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="ERROR", UCX_LOG_LEVEL="error")
    env |= {"OMP_NUM_THREADS": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
    key = os.urandom(8)
    processes: list[subprocess.Popen[bytes]] = []
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        listener._listener._socket.settimeout(timeout_s)  # type: ignore[attr-defined]
        try:
            ends = {}
            for role in ("target", "source"):
                given = {"link": link, "role": role, "port": listener.address[1], "key": key.hex()}
                command = [sys.executable, "-m", "helpers.kv_links", json.dumps(given)]
                process = subprocess.Popen(
                    command,
                    env=env,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                processes.append(process)
            for _ in processes:
                connection = listener.accept()
                ends[_read(connection, timeout_s)] = connection
            sizes = {"sizes": block_bytes, "total": total_bytes, "repeats": repeats}
            ends["target"].send(sizes)
            ends["source"].send({**sizes, "target": _read(ends["target"], timeout_s)})
            rows = _read(ends["source"], timeout_s)
            ends["target"].send("done")
            wrong = _read(ends["target"], timeout_s)
            if wrong:
                raise EngineError(
                    f"{link} delivered {wrong} wrong blocks.", "Do not use this link before that is mended."
                )
        except (OSError, EOFError) as error:
            raise EngineError(
                f"{link} could not be measured: a child broke off or did not answer within {timeout_s:.0f} s.",
                "Run python -m helpers doctor, and try a smaller total.",
            ) from error
        finally:
            for process in processes:
                end_family(process, f"the {link} child", grace_s=0.2)
    return [TransferTime(link=link, **row) for row in rows]


def _read(connection: Connection, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError("no answer")
    value = connection.recv()
    if isinstance(value, dict) and "error" in value:
        raise EngineError(value["error"], "Leave this link out, or look at its own documentation.")
    return value


# -- in the children -------------------------------------------------------------------------------------------------
def _places(buffer: np.ndarray, block: int, n: int) -> list[int]:
    """Addresses of `n` scattered blocks: every second place."""
    return [int(buffer.ctypes.data) + 2 * block * i for i in range(n)]


def _wrong(buffer: np.ndarray, block: int, n: int, seed: int) -> int:
    expected = np.random.default_rng(seed).integers(0, 256, n * block, dtype=np.uint8)
    return sum(
        zlib.crc32(buffer[2 * block * i : 2 * block * i + block].tobytes())
        != zlib.crc32(expected[block * i : block * (i + 1)].tobytes())
        for i in range(n)
    )


def _filled(block: int, n: int, seed: int) -> np.ndarray:
    buffer = np.zeros(2 * block * n, np.uint8)
    data = np.random.default_rng(seed).integers(0, 256, n * block, dtype=np.uint8)
    buffer.reshape(n, 2, block)[:, 0] = data.reshape(n, block)
    return buffer


def _serve_socket(task: dict[str, Any], tell: Connection) -> int:
    server = socket.create_server(("127.0.0.1", 0))
    tell.send(server.getsockname()[1])
    connection, _ = server.accept()
    wrong = 0
    for block in task["sizes"]:
        n = task["total"] // block
        buffer = np.zeros(2 * block * n, np.uint8)
        for _ in range(task["repeats"]):
            for i in range(n):
                view = memoryview(buffer.data)[2 * block * i : 2 * block * i + block]
                while view:
                    got = connection.recv_into(view)
                    if got == 0:
                        raise EOFError
                    view = view[got:]
            connection.sendall(b"k")
        wrong += _wrong(buffer, block, n, block)
    return wrong


def _send_socket(task: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    with socket.create_connection(("127.0.0.1", task["target"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for block in task["sizes"]:
            n, seconds = task["total"] // block, []
            view = memoryview(_filled(block, n, block).data)
            for _ in range(task["repeats"]):
                began = time.perf_counter()
                for i in range(n):
                    connection.sendall(view[2 * block * i : 2 * block * i + block])
                connection.recv(1)
                seconds.append(time.perf_counter() - began)
            rows.append({"block_bytes": block, "n_blocks": n, "seconds": min(seconds), "all_seconds": seconds})
    return rows


def _nixl_agent(name: str) -> Any:
    """An agent without a progress thread: both ends poll here anyway, and four polling threads would share two cores."""
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _serve_nixl(task: dict[str, Any], tell: Connection) -> int:
    agent = _nixl_agent("target")
    buffer = np.zeros(2 * task["total"], np.uint8)
    agent.register_memory(agent.get_reg_descs([(buffer.ctypes.data, buffer.nbytes, 0, "kv")], "DRAM"))
    server = socket.create_server(("127.0.0.1", 0))
    where = {"metadata": agent.get_agent_metadata(), "address": int(buffer.ctypes.data)}
    tell.send({**where, "port": server.getsockname()[1]})
    connection, _ = server.accept()
    wrong = 0
    for block in task["sizes"]:
        for _ in range(task["repeats"] + 1):
            while not agent.get_new_notifs():
                pass
            connection.sendall(b"k")  # the notification comes after the bytes
        wrong += _wrong(buffer, block, task["total"] // block, block)
        connection.sendall(b"n")
    return wrong


def _send_nixl(task: dict[str, Any]) -> list[dict[str, Any]]:
    agent = _nixl_agent("source")
    peer = agent.add_remote_agent(task["target"]["metadata"])
    source = np.zeros(2 * task["total"], np.uint8)
    agent.register_memory(agent.get_reg_descs([(source.ctypes.data, source.nbytes, 0, "kv")], "DRAM"))
    rows = []
    with socket.create_connection(("127.0.0.1", task["target"]["port"])) as connection:
        for block in task["sizes"]:
            n, seconds = task["total"] // block, []
            source[: 2 * block * n] = _filled(block, n, block)
            shift = task["target"]["address"] - int(source.ctypes.data)
            here = [(place, block, 0) for place in _places(source, block, n)]
            there = [(place + shift, block, 0) for place, _, _ in here]
            local, remote = (agent.get_xfer_descs(places, "DRAM") for places in (here, there))
            for _ in range(task["repeats"] + 1):  # the first one pays for the connection
                began = time.perf_counter()
                handle = agent.initialize_xfer("WRITE", local, remote, peer, b"arrived")
                state = agent.transfer(handle)
                while state not in ("DONE", "ERR"):
                    state = agent.check_xfer_state(handle)
                if state == "ERR":
                    raise RuntimeError("a transfer ended in an error")
                connection.recv(1)  # done here may still be under way there
                seconds.append(time.perf_counter() - began)
                agent.release_xfer_handle(handle)
            rows.append({"block_bytes": block, "n_blocks": n, "seconds": min(seconds[1:]), "all_seconds": seconds[1:]})
            connection.recv(1)
    return rows


def _serve_mooncake(task: dict[str, Any], tell: Connection) -> int:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine did not start")
    buffer = np.zeros(2 * task["total"], np.uint8)
    engine.register_memory(buffer.ctypes.data, buffer.nbytes)
    server = socket.create_server(("127.0.0.1", 0))
    where = {"server": f"127.0.0.1:{engine.get_rpc_port()}", "address": int(buffer.ctypes.data)}
    tell.send({**where, "port": server.getsockname()[1]})
    connection, _ = server.accept()
    wrong = 0
    for block in task["sizes"]:
        connection.recv(1)
        wrong += _wrong(buffer, block, task["total"] // block, block)
        connection.sendall(b"n")
    return wrong


def _send_mooncake(task: dict[str, Any]) -> list[dict[str, Any]]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine did not start")
    source = np.zeros(2 * task["total"], np.uint8)
    engine.register_memory(source.ctypes.data, source.nbytes)
    rows = []
    with socket.create_connection(("127.0.0.1", task["target"]["port"])) as connection:
        for block in task["sizes"]:
            n, seconds = task["total"] // block, []
            source[: 2 * block * n] = _filled(block, n, block)
            here = _places(source, block, n)
            there = [place - int(source.ctypes.data) + task["target"]["address"] for place in here]
            for _ in range(task["repeats"] + 1):
                began = time.perf_counter()
                if engine.batch_transfer_sync_write(task["target"]["server"], here, there, [block] * n):
                    raise RuntimeError("a transfer ended in an error")
                seconds.append(time.perf_counter() - began)
            rows.append({"block_bytes": block, "n_blocks": n, "seconds": min(seconds[1:]), "all_seconds": seconds[1:]})
            connection.sendall(b"d")
            connection.recv(1)
    return rows


PARTS: dict[str, tuple[Any, Any]] = {
    "TCP socket": (_serve_socket, _send_socket),
    "NIXL": (_serve_nixl, _send_nixl),
    "Mooncake": (_serve_mooncake, _send_mooncake),
}


def _child(given: dict[str, Any]) -> None:
    with Client(("127.0.0.1", given["port"]), authkey=bytes.fromhex(given["key"])) as connection:
        connection.send(given["role"])
        serve, send = PARTS[given["link"]]
        try:
            task = connection.recv()
            if given["role"] == "source":
                connection.send(send(task))
            else:
                wrong = serve(task, connection)
                connection.recv()
                connection.send(wrong)
        except Exception as error:
            connection.send({"error": f"{given['link']} failed: {type(error).__name__}: {str(error)[:300]}"})
    os._exit(0)


if __name__ == "__main__":
    end_with_parent()
    _child(json.loads(sys.argv[1]))
