"""Published tables, run again and compared."""
