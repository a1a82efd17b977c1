"""The executor's events, and statistics made from them."""
