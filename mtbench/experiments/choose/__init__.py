"""Which method to use: a race of candidates in which arms leave, and the decision."""
