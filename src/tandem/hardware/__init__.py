"""What things cost on one machine: profiles and their files."""
