"""Coverage-guided fuzzing of model files: each is loaded and run, or refused with one sentence.

python -m tests.fuzz [KIND] [--count N | --seconds N]: libFuzzer through atheris, in a child process
with limits on memory and on each input's time. Findings are written to build/fuzz. Inputs of fixed
bugs are in corpus/, by kind, and `test_files.py` runs them all.
"""
