"""The planner on a virtual clock: replays of routing traces, the exact optimum, Belady's bound."""
