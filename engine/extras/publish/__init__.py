"""Weights for whoever serves them, published as steps change them."""
