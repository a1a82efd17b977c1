"""Three small lm-eval tasks on local files, for lm-eval by API and in process."""

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

_METRICS = {"exact_match,none", "acc,none", "word_perplexity,none"}
_TASKS = Path(__file__).with_name("lm_eval_tasks")


def evaluate(task: str, model: Any, **options: Any) -> float:
    """Return the value of a task's only metric."""
    tasks = TaskManager(include_path=str(_TASKS), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **options
    )
    (metric,) = (value for name, value in found["results"][task].items() if name in _METRICS)
    return float(metric)
