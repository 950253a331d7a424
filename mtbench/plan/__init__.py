"""What is to be decoded, what was, and the files that hold both."""
