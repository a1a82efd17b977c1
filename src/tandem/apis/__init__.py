"""What clients send and get, API by API: bodies to generation requests, answers to objects."""
