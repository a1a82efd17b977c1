"""Makes a device `threaded` known: the emulated one on the wall clock, with captured steps.

Loads nothing, so that a program can import it before the command line's options are made.
"""

from tandem.devices import DEVICES, Emulated


@DEVICES.register("threaded")
class Threaded(Emulated):
    machine = "tests.hf.threaded"
