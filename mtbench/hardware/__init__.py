"""What the machine is and what it can do."""
