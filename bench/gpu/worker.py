"""One implementation in a process of its own, so that its crash, its hang or its libraries are no
one else's.

Worker is the side that asks; run as a program, this file is the side that measures. They exchange
JSON, one line a message.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time

from workloads import Workload


def to_message(workload: Workload) -> dict:
    return dataclasses.asdict(workload)


def from_message(message: dict) -> Workload:
    return Workload(**{**message, "lengths": tuple(message["lengths"])})


class WorkerError(Exception):
    """The worker cannot do what was asked; `dead` if it is gone with it."""

    def __init__(self, reason: str, dead: bool):
        super().__init__(reason)
        self.dead = dead


class Worker:
    def __init__(self, impl: str, command: list[str] | None = None):
        self.impl = impl
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        self._process = subprocess.Popen(
            command or [sys.executable, __file__, impl],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, op: str, **arguments) -> None:
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # receive() says what happened

    def receive(self, timeout: float) -> dict:
        """The next answer. A worker that gives none in time is ended."""
        try:
            line = self._lines.get(timeout=max(0.0, timeout))
        except queue.Empty:
            self.end()
            raise WorkerError("no answer in time", dead=True) from None
        if line is None:
            status = self._process.wait()
            raise WorkerError(f"ended with status {status}: {self._last_words()}", dead=True)
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"], dead=answer.get("dead", False))
        return answer

    def ready(self) -> bool:
        """Whether an answer, or the news of the end, is waiting."""
        return not self._lines.empty()

    def ask(self, op: str, timeout: float, **arguments) -> dict:
        self.send(op, **arguments)
        return self.receive(timeout)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no message"


# ---- the side that measures ---------------------------------------------------------------------


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def is_dead(error: Exception) -> bool:
    """After an error of the device its context is of no use any more."""
    text = str(error)
    return "CUDA error" in text or "illegal memory" in text or getattr(error, "status", 0) == 4


class Serving:
    def __init__(self, impl: str):
        from impls import builder

        self._impl, self._build = impl, builder(impl)
        self._case = None

    def load(self, workloads: list[dict]) -> dict:
        """Compiles what plain workloads need, where compiling takes long, on tiny ones."""
        from case import Inputs, Timer
        from impls import COMPILING, versions

        every = [from_message(w) for w in workloads]
        tiny = {w.tiny(): None for w in every if w.plain}  # a set in order
        for w in tiny if self._impl in COMPILING else ():
            try:
                self._build(w, Inputs(w)).measure(Timer())
            except Exception as error:
                if is_dead(error):
                    raise
                # The workload itself will say so.
        return self.finish() | {"versions": versions(self._impl)}

    def prepare(self, workload: dict) -> dict:
        from case import Measured, Refused

        begin = time.perf_counter()
        try:
            self._case = Measured(from_message(workload), self._build)
        except Refused as refusal:
            return {"error": f"refused: {refusal}"}
        return {
            "seconds": round(time.perf_counter() - begin, 2),
            "cosine": self._case.cosine,
            "note": self._case.case.note,
            "facts": self._case.case.facts,
        }

    def measure(self, repeats: int) -> dict:
        samples, equal = self._case.repeat(repeats)
        return {"samples": samples, "equal": equal}

    def finish(self) -> dict:
        import torch

        self._case = None
        torch.cuda.empty_cache()
        return {}


def serve(impl: str) -> int:
    # Libraries print: only answers go to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        serving = Serving(impl)
    except BaseException as error:
        answer({"error": f"cannot be loaded: {short(error)}", "dead": True})
        return 1
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            answer(getattr(serving, op)(**request))
        except Exception as error:
            answer({"error": f"failed: {short(error)}", "dead": is_dead(error)})
            if is_dead(error):
                return 1
            serving.finish()
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
