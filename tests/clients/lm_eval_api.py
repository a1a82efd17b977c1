"""Tries lm-eval by API: generation, multiple choice and perplexity through completions and chat."""

# /// script
# # transformers: counts tokens; lm-eval does not ask for it.
# dependencies = ["lm_eval[api]", "transformers"]
# ///

import sys

from tests.clients.lm_eval_scores import evaluate
from tests.clients.trying import Served, report


def generation(served: Served) -> str:
    return _completions(served, "tandem_generation")


def multiple_choice(served: Served) -> str:
    return _completions(served, "tandem_choice")


def perplexity(served: Served) -> str:
    return _completions(served, "tandem_perplexity")


def multiple_choice_of_texts_in_batches(served: Served) -> str:
    """Run multiple choice with several prompts a request, sent as text."""
    return _completions(served, "tandem_choice", tokenized_requests=False, batch_size=4)


def generation_by_chat(served: Served) -> str:
    arguments = {"model": served.name, "base_url": f"{served.base_url}/chat/completions"}
    score = evaluate(
        "tandem_generation", "local-chat-completions", model_args=arguments,
        apply_chat_template=True,
    )  # fmt: skip
    return f"{score:.4g}"


def _completions(served: Served, task: str, **options: object) -> str:
    arguments = {
        "model": served.name, "base_url": f"{served.base_url}/completions",
        "tokenizer": str(served.directory), "max_retries": 1, **options,
    }  # fmt: skip
    return f"{evaluate(task, 'local-completions', model_args=arguments):.4g}"


if __name__ == "__main__":
    tries = [
        generation, multiple_choice, perplexity, multiple_choice_of_texts_in_batches,
        generation_by_chat,
    ]  # fmt: skip
    sys.exit(report("lm_eval", tries))
