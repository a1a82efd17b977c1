"""Speculation: drafted tokens are verified together, and kept as far as they are the answer's."""

# What a user may ask for; what there is to draft with is in `drafters`, which loads torch.
SPECULATE = ("auto", "lookup", "mtp", "none")
