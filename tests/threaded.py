"""Registers a device `threaded`: the emulated one on the wall clock, with captured steps.

It imports nothing heavy, so that a program can import it before it parses its options.
"""

from tandem.devices import DEVICES, Emulated


@DEVICES.register("threaded")
class Threaded(Emulated):
    machine = "tests.hf.threaded"
