"""What the executor reports, and what is made of it."""
