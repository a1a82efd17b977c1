"""Builds and loads `guard.cpp`, in two seconds, once a process."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("guard.cpp")


@functools.cache
def device_guard() -> ctypes.CDLL:
    """Return the library, whose `shadow_guard(1)` lets tensors say `cuda:0`; 0 undoes it."""
    libraries = str(Path(torch.__file__).parent / "lib")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "libguard.so")
        includes = [f"-I{folder}" for folder in include_paths()]
        command = ["c++", "-std=c++20", "-shared", "-fPIC", *includes, str(SOURCE), "-o", path]
        subprocess.run([*command, f"-L{libraries}", "-lc10"], check=True)
        return ctypes.CDLL(path)
