"""A real sgl.Engine on a CPU that obeys JSON lines: for the test that takes its master away.

Runs under the engine environment and the stand-ins of the SGLang adapter's tests.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cpu_engine import arguments, flush, generate, make_model


class Driver:
    """One engine with the backend under its hierarchical cache."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        import sglang

        extra = {"options": options, "timeout_s": 2.0}
        self._engine = sglang.Engine(**arguments(str(make_model(Path(folder))), "hicache.mooncake", extra))

    def once(self, settle_s: float = 0.7) -> dict[str, Any]:
        """Answer the prompt with the device and host caches empty; what was set before has been backed up."""
        threading.Event().wait(settle_s)
        flush(self._engine)
        return generate(self._engine)

    def load(self, seconds: float) -> list[dict[str, Any]]:
        """Answer it again and again."""
        until = time.monotonic() + seconds
        answers = []
        while time.monotonic() < until:
            answers.append(self.once(0.1))
        return answers

    def until_storage(self, seconds: float) -> dict[str, Any]:
        """Answer it until its prefix comes from storage."""
        until = time.monotonic() + seconds
        while True:
            answer = self.once()
            if answer["storage"] or time.monotonic() > until:
                return answer

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.shutdown()


def main() -> None:
    driver = Driver(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.write("RESULT ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(driver, request.pop("verb"))(**request)
        sys.stdout.write(f"RESULT {json.dumps(result)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
