"""Laws over every file of a folder: what must hold whatever the algorithm is called."""
