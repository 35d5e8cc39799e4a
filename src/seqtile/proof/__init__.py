"""Does a tiled model compute what the untiled one does? On small models, and in the first training step."""
