"""seqtile inside the trainers that people use. None of these files imports its trainer before it is used."""
