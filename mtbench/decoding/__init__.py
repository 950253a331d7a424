"""The decode loop and the interface of a decoding method."""
