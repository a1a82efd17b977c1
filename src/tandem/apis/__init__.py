"""What clients send and receive, per API: bodies become requests, outputs become answers."""
