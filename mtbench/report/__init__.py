"""From results.json to what people read."""
