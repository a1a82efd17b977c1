"""`tandem doctor --report`: what works on a machine that its makers do not have, in one file."""
