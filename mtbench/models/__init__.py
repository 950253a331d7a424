"""The weights and one forward over them."""
