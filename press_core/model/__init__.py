"""The parts of a model that presses use: attention sites, rotary embeddings, the decoder."""
