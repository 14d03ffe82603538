"""A notebook's own functions in processes of their own, with the model loaded there: instances that talk to each other.

``with Peer([send, receive, decode_instance], model, dtype) as peer: peer.do(decode_instance, port=...)`` starts a child,
hands it the source of the functions named (and of nothing else), loads the model, and calls one of them with it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from helpers.engines.base import EngineInfo, RunRecord
from helpers.engines.child import ChildEngine
from helpers.errors import EngineError
from helpers.hardware import PATIENT_THREADS, describe
from helpers.workload import Workload


def source_of(thing: Any) -> str:
    """The source of a function or class, also of a class that a notebook's cell defines (`inspect` finds no file for it)."""
    if not inspect.isclass(thing):
        return inspect.getsource(thing)
    methods = [value for value in vars(thing).values() if inspect.isfunction(value)]
    lines = linecache.getlines(methods[0].__code__.co_filename) if methods else []
    text = "".join(lines)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "".join(lines[first - 1 : node.end_lineno])
    raise EngineError(
        f"The source of {thing.__name__} cannot be found.", "Define it in a cell, with at least one method."
    )


class Peer(ChildEngine):
    """A child process that holds the model and runs the functions it was given.

    Parameters
    ----------
    functions : functions and classes; their sources run in the child in this order, with torch and time imported.
    model : catalogue name or folder.
    dtype : of weights and cache.
    threads : processor threads of the model.
    setup : further source, run first (a tiny model of a test: it may define ``model``, and then none is loaded).
    call_timeout_s : the longest a single call may take, seconds.

    Raises
    ------
    EngineError : the child died, or a function raised; with its message, and the end of the log where it died.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        model: str | None,
        dtype: str = "float32",
        *,
        threads: int = 1,
        setup: str = "",
        call_timeout_s: float = 120.0,
    ) -> None:
        device = describe().device
        super().__init__(
            "helpers.peers:PeerBackend",
            {
                "source": "\n\n".join(source_of(function) for function in functions),
                "model": model,
                "dtype": dtype,
                "device": device,
                "setup": setup,
                "threads": threads,
            },
            env={"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "2", **PATIENT_THREADS},
            run_timeout_s=call_timeout_s,
        )

    def do(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call `function` in the child as ``function(model, **arguments)``; arguments and value are JSON."""
        return self.call("do", function=function.__name__, arguments=arguments)


class PeerBackend:
    """Runs in the child; see `Peer`."""

    def __init__(self, *, source: str, model: str | None, dtype: str, device: str, setup: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._scope: dict[str, Any] = {"__name__": "peer", "torch": torch}
        for name, text in (("setup", "import time\n" + setup), ("cells", source)):
            linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(keepends=True), f"<{name}>")
            exec(compile(text, f"<{name}>", "exec", dont_inherit=True), self._scope)
        self._model = self._scope.get("model")
        if self._model is None and model is not None:
            from helpers import models
            from helpers.memory import release_free_memory

            self._model = models.load_model(model, dtype=dtype, device=device)  # type: ignore[arg-type]
            release_free_memory()
        self.info = EngineInfo(
            engine="notebook peer", version="13", model=str(model), dtype=dtype, device=device, max_model_len=0
        )

    def do(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call one of the functions."""
        if function not in self._scope:
            raise EngineError(f"The peer does not know {function!r}.", "Name it among the functions of the Peer.")
        return self._scope[function](self._model, **arguments)

    def run(self, workload: Workload, warmup: int) -> RunRecord:
        """Peers run no workloads."""
        raise EngineError("A peer runs functions, no workloads.", "Use do().")

    def close(self) -> None:
        """Nothing is held outside the process."""
