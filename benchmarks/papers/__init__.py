"""The tables and figures of the two papers that Tandem follows: theirs, and ours by command."""
