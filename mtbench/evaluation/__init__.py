"""What a suite is, and how answers are scored."""
