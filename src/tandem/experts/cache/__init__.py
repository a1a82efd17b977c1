"""A device's expert cache: slots, copies and initial contents."""
