"""How fast blocks of memory move from one process to another: plain TCP, NIXL and Mooncake's transfer engine, by block size.

`measure` starts two children, a target that owns an empty buffer and a source that fills it block by block, and takes the
clock of the source, until the target says that the bytes are there (for Mooncake the source tells it, when its call returns).
After each size bytes are compared at the target: a transfer that loses or swaps blocks raises.
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
from collections.abc import Callable
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
def _places(address: int, block: int, n: int) -> list[int]:
    """Addresses of `n` scattered blocks: every second place."""
    return [address + 2 * block * i for i in range(n)]


def _wrong(buffer: np.ndarray, block: int, n: int, seed: int) -> int:
    expected = np.random.default_rng(seed).integers(0, 256, n * block, dtype=np.uint8)
    return sum(
        zlib.crc32(buffer[2 * block * i : 2 * block * i + block].tobytes())
        != zlib.crc32(expected[block * i : block * (i + 1)].tobytes())
        for i in range(n)
    )


def _fill(buffer: np.ndarray, block: int, n: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, n * block, dtype=np.uint8)
    buffer[: 2 * block * n].reshape(n, 2, block)[:, 0] = data.reshape(n, block)


class _Socket:
    """Plain TCP: the bytes go over the connection itself, block by block."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.view = memoryview(buffer.data)

    where: dict[str, Any] = {}
    """What the source must know of the target."""

    def receive(self, connection: socket.socket, block: int, n: int) -> None:
        """Target: wait until a transfer has arrived."""
        for i in range(n):
            view = self.view[2 * block * i : 2 * block * i + block]
            while view:
                got = connection.recv_into(view)
                if got == 0:
                    raise EOFError
                view = view[got:]

    def mover(self, connection: socket.socket, target: dict[str, Any], block: int, n: int) -> Callable[[], None]:
        """Source: what moves `n` blocks once; preparing that is not on the clock."""

        def move() -> None:
            for i in range(n):
                connection.sendall(self.view[2 * block * i : 2 * block * i + block])

        return move


class _Nixl:
    """NIXL over UCX. No progress thread: both ends poll here anyway, and four polling threads would share two cores."""

    def __init__(self, buffer: np.ndarray) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.address = int(buffer.ctypes.data)
        self.agent = nixl_agent(f"process-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory(self.agent.get_reg_descs([(self.address, buffer.nbytes, 0, "kv")], "DRAM"))
        self.where = {"metadata": self.agent.get_agent_metadata(), "address": self.address}
        self.peer: Any = None

    def receive(self, connection: socket.socket, block: int, n: int) -> None:
        while not self.agent.get_new_notifs():  # the notification comes after the bytes
            pass

    def mover(self, connection: socket.socket, target: dict[str, Any], block: int, n: int) -> Callable[[], None]:
        self.peer = self.peer or self.agent.add_remote_agent(target["metadata"])
        here, there = ([(place, block, 0) for place in _places(a, block, n)] for a in (self.address, target["address"]))
        local, remote = (self.agent.get_xfer_descs(places, "DRAM") for places in (here, there))

        def move() -> None:
            handle = self.agent.initialize_xfer("WRITE", local, remote, self.peer, b"arrived")
            state = self.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
            if state == "ERR":
                raise RuntimeError("a transfer ended in an error")

        return move


class _Mooncake:
    """Mooncake's transfer engine over TCP, without a metadata server."""

    BATCH = 2048
    """Blocks in one call; of 8,192 the call fails."""

    def __init__(self, buffer: np.ndarray) -> None:
        from mooncake.engine import TransferEngine

        self.engine, self.address = TransferEngine(), int(buffer.ctypes.data)
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the transfer engine did not start")
        self.engine.register_memory(self.address, buffer.nbytes)
        self.where = {"server": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.address}

    def receive(self, connection: socket.socket, block: int, n: int) -> None:
        connection.recv(1)  # the engine tells its target nothing: the source does, when its call has returned

    def mover(self, connection: socket.socket, target: dict[str, Any], block: int, n: int) -> Callable[[], None]:
        here, there = (_places(address, block, n) for address in (self.address, target["address"]))

        def move() -> None:
            for i in range(0, n, self.BATCH):
                batch = here[i : i + self.BATCH], there[i : i + self.BATCH]
                if self.engine.batch_transfer_sync_write(target["server"], *batch, [block] * len(batch[0])):
                    raise RuntimeError("a transfer ended in an error")
            connection.sendall(b"d")

        return move


ENDS: dict[str, Any] = {"TCP socket": _Socket, "NIXL": _Nixl, "Mooncake": _Mooncake}


def _serve(link: str, task: dict[str, Any], tell: Connection) -> int:
    """Target: receive every transfer, say so at once, compare the bytes after each size; the number of wrong blocks."""
    buffer = np.zeros(2 * task["total"], np.uint8)
    end, wrong = ENDS[link](buffer), 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        tell.send({**end.where, "port": server.getsockname()[1]})
        connection, _ = server.accept()
    with connection:
        for block in task["sizes"]:
            n = task["total"] // block
            for _ in range(task["repeats"] + 1):
                end.receive(connection, block, n)
                connection.sendall(b"k")
            wrong += _wrong(buffer, block, n, block)
            connection.sendall(b"n")
    return wrong


def _send(link: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Source: a row for each size; a transfer's clock runs until the target says that the bytes are there."""
    source, rows = np.zeros(2 * task["total"], np.uint8), []
    end = ENDS[link](source)
    with socket.create_connection(("127.0.0.1", task["target"]["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for block in task["sizes"]:
            n, seconds = task["total"] // block, []
            _fill(source, block, n, block)
            move = end.mover(connection, task["target"], block, n)
            for _ in range(task["repeats"] + 1):
                began = time.perf_counter()
                move()
                connection.recv(1)
                seconds.append(time.perf_counter() - began)
            del seconds[0]  # it paid for the connection
            rows.append({"block_bytes": block, "n_blocks": n, "seconds": min(seconds), "all_seconds": seconds})
            connection.recv(1)
    return rows


def _child(given: dict[str, Any]) -> None:
    with Client(("127.0.0.1", given["port"]), authkey=bytes.fromhex(given["key"])) as connection:
        connection.send(given["role"])
        try:
            task = connection.recv()
            if given["role"] == "source":
                connection.send(_send(given["link"], task))
            else:
                wrong = _serve(given["link"], task, connection)
                connection.recv()
                connection.send(wrong)
        except Exception as error:
            connection.send({"error": f"{given['link']} failed: {type(error).__name__}: {str(error)[:300]}"})
    os._exit(0)


if __name__ == "__main__":
    end_with_parent()
    _child(json.loads(sys.argv[1]))
