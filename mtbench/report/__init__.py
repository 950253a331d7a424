"""From results.json to pages, tables and figures."""
