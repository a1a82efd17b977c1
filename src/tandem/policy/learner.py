"""Policies that put learning off, so that a plan does not wait for it."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Learner(Protocol):
    """Notes what happened and learns from it later; when that is changes no answer."""

    def learn(self) -> None:
        """Learn from everything noted so far."""
