"""One vLLM engine behind HTTP in one process: what prefill/decode disaggregation needs two of, in little memory.

``vllm serve`` takes two processes, an API server beside the engine. Here the engine's own process answers: 1 GB instead of
1.8 GB, so that two servers and a notebook fit into 3 GiB. The scheduler, the model and the KV connectors are vLLM's; only the
front end is ours. It speaks the part of OpenAI's completions API that a router needs, ``kv_transfer_params`` included, in token
ids both ways: it has no tokenizer, which saves memory again.

``python -m helpers.engines.pd_server '{"model": FOLDER, "port": 8000, ...}'`` starts it; see `helpers.pd_servers.PDServer`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.engines.http_handler import JsonHandler, serve

IDLE_S = 0.003
"""Seconds between two looks for work while nothing runs."""


class EngineLoop:
    """Steps one ``LLMEngine``; other threads hand in requests and read each one's own queue.

    Parameters
    ----------
    options : keyword arguments of ``vllm.LLM``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine: Any = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self.steps: list[tuple[float, float, list[Any]]] = []
        self._seen: dict[str, int] = {}
        self._planned: list[Any] = []
        self._watch_plans()

    def _watch_plans(self) -> None:
        """Keep what each step ran, as pairs (position of the first token, tokens)."""
        scheduler = self.core.scheduler
        plan = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            planned = plan(*arguments, **named)
            spans = []
            for request_id, n in planned.num_scheduled_tokens.items():
                request = scheduler.requests.get(request_id)
                # Planning has already counted the step's tokens as computed.
                spans.append((max(0, request.num_computed_tokens - n) if request else 0, int(n)))
            self._planned = spans
            return planned

        scheduler.schedule = schedule

    def submit(self, request_id: str, body: dict[str, Any]) -> queue.SimpleQueue[dict[str, Any]]:
        """Hand in a request; its events come from the queue that is returned."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.answers[request_id] = answer
        self.inbox.put(lambda: self._add(request_id, body))
        return answer

    def cancel(self, request_id: str) -> None:
        """Forget a request whose reader is gone."""
        self.inbox.put(lambda: self._drop(request_id))

    def ask(self, function: Any, timeout_s: float = 30.0) -> Any:
        """Run `function` between two steps, in the engine's thread; returns its value or raises its error."""
        reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                reply.put((function(), None))
            except Exception as error:
                reply.put((None, error))

        self.inbox.put(run)
        value, error = reply.get(timeout=timeout_s)
        if error is not None:
            raise error
        return value

    def _add(self, request_id: str, body: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        transfer = body.get("kv_transfer_params")
        try:
            params = SamplingParams(
                max_tokens=int(body.get("max_tokens", 16)),
                temperature=float(body.get("temperature", 0.0)),
                ignore_eos=bool(body.get("ignore_eos", False)),
                seed=body.get("seed"),
                detokenize=False,
                extra_args={"kv_transfer_params": transfer} if transfer else None,
            )
            prompt = body["prompt"]
            if not isinstance(prompt, list):
                raise ValueError("the prompt must be a list of token ids; this server has no tokenizer")
            given = TokensPrompt(prompt_token_ids=prompt)
            self._seen[request_id] = 0
            self.engine.add_request(request_id, given, params)
        except Exception as error:
            self._seen.pop(request_id, None)
            self._tell(request_id, {"error": f"{type(error).__name__}: {error}", "finished": True})

    def _drop(self, request_id: str) -> None:
        if self._seen.pop(request_id, None) is not None:
            self.engine.abort_request([request_id])
        self.answers.pop(request_id, None)

    def _tell(self, request_id: str, event: dict[str, Any]) -> None:
        answer = self.answers.get(request_id)
        if answer is not None:
            answer.put(event)
        if event["finished"]:
            self.answers.pop(request_id, None)
            self._seen.pop(request_id, None)

    def run(self) -> None:
        """Step for ever. The engine keeps steps for transfers too, after the last request is answered."""
        while True:
            try:
                while True:
                    self.inbox.get_nowait()()
            except queue.Empty:
                pass
            if not self.core.scheduler.has_requests():
                try:
                    self.inbox.get(timeout=0.05)()
                except queue.Empty:
                    continue
            self._planned = []
            began = time.monotonic()
            outputs = self.engine.step()
            ended = time.monotonic()
            if self._planned:
                self.steps.append((began, ended - began, self._planned))
            else:
                time.sleep(IDLE_S)  # only a transfer is under way
            for output in outputs:
                self._publish(output, ended)

    def _publish(self, output: Any, moment: float) -> None:
        done = output.outputs[0]
        ids = list(done.token_ids)
        new = ids[self._seen.get(output.request_id, 0) :]
        if not new and not output.finished:
            return
        self._seen[output.request_id] = len(ids)
        event: dict[str, Any] = {
            "ids": new,
            "n": len(ids),
            "n_prompt": len(output.prompt_token_ids or []),
            "cached": output.num_cached_tokens or 0,
            "time": moment,
            "finished": bool(output.finished),
        }
        if output.finished:
            event["finish_reason"] = done.finish_reason
            event["kv_transfer_params"] = output.kv_transfer_params
            if done.finish_reason in ("error", "abort"):
                event["error"] = (
                    "The engine gave the request up (finish reason error): its keys and values did not arrive."
                )
        self._tell(output.request_id, event)


def usage_of(event: dict[str, Any]) -> dict[str, Any]:
    """A usage report in OpenAI's words."""
    return {
        "prompt_tokens": event["n_prompt"],
        "completion_tokens": event["n"],
        "total_tokens": event["n_prompt"] + event["n"],
        "prompt_tokens_details": {"cached_tokens": event["cached"]},
    }


def handler(loop: EngineLoop, settings: dict[str, Any]) -> type[JsonHandler]:
    """The class that answers HTTP for this engine."""
    numbers = itertools.count()

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, {})
            elif self.path == "/version":
                self.reply(200, {"version": settings["version"]})
            elif self.path == "/v1/models":
                card = {"id": settings["name"], "object": "model", "max_model_len": settings["max_model_len"]}
                self.reply(200, {"object": "list", "data": [card]})
            elif self.path == "/metrics":
                from prometheus_client import generate_latest

                self.reply(200, generate_latest().decode(), "text/plain; version=0.0.4")
            elif self.path == "/steps":
                self.reply(200, loop.ask(lambda: list(loop.steps)))
            elif self.path == "/memory":
                from helpers.memory import resident_bytes

                self.reply(200, {"resident": resident_bytes(), "num_kv_blocks": settings["num_kv_blocks"]})
            else:
                self.reply(404, {"error": {"message": f"There is no {self.path}."}})

        def do_POST(self) -> None:
            if (body := self.body()) is None:
                return
            if self.path == "/control":
                try:
                    self.reply(200, loop.ask(lambda: control(loop, body)))
                except (TypeError, ValueError) as error:
                    self.reply(400, {"error": {"message": f"A setting cannot be read: {error}"}})
                except queue.Empty:
                    self.reply(503, {"error": {"message": "The engine is in a long step; ask again."}})
            elif self.path != "/v1/completions":
                self.reply(404, {"error": {"message": f"There is no {self.path}."}})
            elif body.get("stream"):
                self.stream(body)
            else:
                self.whole(body)

        def events(self, request_id: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            answer = loop.submit(request_id, body)
            while True:
                event = answer.get()
                yield event
                if event["finished"]:
                    return

        def whole(self, body: dict[str, Any]) -> None:
            request_id = f"request-{next(numbers)}"
            ids: list[int] = []
            event: dict[str, Any] = {}
            for event in self.events(request_id, body):
                ids += event.get("ids", [])
            if "error" in event:
                self.reply(500 if "finish_reason" in event else 400, {"error": {"message": event["error"]}})
                return
            choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": event["finish_reason"]}
            answer = {"id": request_id, "object": "text_completion", "model": settings["name"], "choices": [choice]}
            transfer = event["kv_transfer_params"]
            self.reply(200, {**answer, "usage": usage_of(event), "kv_transfer_params": transfer})

        def stream(self, body: dict[str, Any]) -> None:
            request_id = f"request-{next(numbers)}"
            events = self.events(request_id, body)
            self.begin_stream()
            try:
                for event in events:
                    if "error" in event:
                        self.event({"error": {"message": event["error"]}})
                        break
                    reason = event.get("finish_reason")
                    choice = {"index": 0, "text": "", "token_ids": event["ids"], "finish_reason": reason}
                    head = {"id": request_id, "object": "text_completion", "model": settings["name"]}
                    self.event({**head, "choices": [choice], "usage": usage_of(event)})
                self.end_stream()
            except OSError:
                loop.cancel(request_id)

    return Handler


def control(loop: EngineLoop, body: dict[str, Any]) -> dict[str, Any]:
    """What a client may change between two runs: the token budget of a step; forgetting cached prefixes and the step log."""
    if "max_num_batched_tokens" in body:
        most = loop.engine.vllm_config.scheduler_config.max_num_batched_tokens
        loop.core.scheduler.max_num_scheduled_tokens = min(int(body["max_num_batched_tokens"]), most)
    if body.get("forget"):
        loop.steps.clear()
        loop.llm.reset_prefix_cache()
    return {"max_num_batched_tokens": loop.core.scheduler.max_num_scheduled_tokens}


PATIENCE_US = 500
"""Microseconds that NIXL's progress thread sleeps between two looks, on a CPU."""


def patient_nixl() -> None:
    """Let NIXL's progress thread sleep between two looks. It spins by default, and on a CPU it takes a core from the model."""
    try:
        module = importlib.import_module(importlib.import_module("nixl._api").nixl_agent.__module__)
        bindings: Any = module.nixlBind  # type: ignore[attr-defined]

        class PatientConfig(bindings.nixlAgentConfig):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, PATIENCE_US if name == "pthrDelay" else value)
    except (ImportError, AttributeError) as error:
        print(f"NIXL's progress thread keeps spinning ({error}): it takes a core from the engines.", flush=True)
        return
    bindings.nixlAgentConfig = PatientConfig


def free_threads(cores: set[int]) -> None:
    """Give all threads of this process the cores `cores` again: on a CPU, vLLM pins each engine's to the first core."""
    for task in Path("/proc/self/task").glob("*") if cores else ():
        with contextlib.suppress(OSError):  # the thread may have ended
            os.sched_setaffinity(int(task.name), cores)


def main(settings: dict[str, Any]) -> None:
    """Build the engine, answer HTTP in threads, and step in the main thread."""
    if settings["patient"]:
        patient_nixl()
    from helpers.memory import release_free_memory

    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    loop = EngineLoop(settings["llm"])
    free_threads(cores)
    release_free_memory()  # what loading and repacking the weights left behind
    settings["num_kv_blocks"] = int(loop.engine.vllm_config.cache_config.num_gpu_blocks or 0)
    serve(handler(loop, settings), settings["port"], "http")
    loop.run()


if __name__ == "__main__":
    from helpers.engines.processes import end_with_parent

    end_with_parent()
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        os._exit(0)
