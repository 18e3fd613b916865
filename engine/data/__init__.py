"""What the engine does with training data: sequences that grow, samples that become harder."""
