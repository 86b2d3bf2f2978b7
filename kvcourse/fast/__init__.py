"""The same model faster: matrices joined, the small operations between them compiled, weights in 8 or 4 bits."""
