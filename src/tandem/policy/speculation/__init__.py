"""How many drafted tokens a step verifies: decisions, without models and without a clock."""
