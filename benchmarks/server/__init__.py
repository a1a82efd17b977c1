"""What the server costs and bears."""
