"""Damaged model files, guided by coverage: each is loaded and run, or refused with one sentence.

python -m tests.fuzz [KIND] [--count N | --seconds N]: by libFuzzer through atheris, in a child
process with a limit on memory and on each input's time; what it finds goes to build/fuzz. Found
inputs that are mended lie in corpus/, by kind, and `test_files.py` tries them all.
"""
