"""`tandem doctor --report`: tests a machine that the developers do not have, and writes one
file.
"""
