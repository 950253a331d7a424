"""From stored lines to results.json."""
