"""The machine: its description, its clocks and its speed."""
