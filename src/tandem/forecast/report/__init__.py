"""`tandem doctor --report`: tests a machine that the developers lack, and writes one file."""
