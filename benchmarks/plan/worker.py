"""One step of one configuration: `python -m benchmarks.plan.worker JOB` prints a line of JSON.

The process is already in its control group.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

from benchmarks.plan.draws import Configuration
from benchmarks.plan.steps import execute, plan, speed_ratio, write_model

from tandem.core.errors import TandemError


def main() -> None:
    """Run a step; a refusal is a sentence and exit code 2."""
    job = json.loads(sys.argv[1])
    configuration, folder = Configuration(**job["configuration"]), Path(job["folder"])
    try:
        result = _step(job, configuration, folder)
    except TandemError as error:
        print(error, file=sys.stderr)
        os._exit(2)
    print(json.dumps(result), flush=True)
    os._exit(0)  # without giving gigabytes back one by one


def _step(job: dict[str, Any], configuration: Configuration, folder: Path) -> dict[str, Any]:
    match job["step"]:
        case "write":
            return {"folder": str(write_model(configuration, folder))}
        case "plan":
            return asdict(plan(configuration, folder, job["experts_bytes"]))
        case _:
            taken = execute(configuration, folder, job["experts_bytes"])
            if job["has_speed"] and configuration.device_share is None:
                with TemporaryDirectory() as cache:
                    ratio = speed_ratio(configuration, folder, Path(cache))
                taken = replace(taken, speed_ratio=ratio)
            return asdict(taken)


if __name__ == "__main__":
    main()
