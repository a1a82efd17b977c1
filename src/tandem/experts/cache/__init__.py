"""A device's expert cache, and the host slots: memory, copies, decisions, initial contents."""
