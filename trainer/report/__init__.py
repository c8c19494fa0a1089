"""Write what a run leaves to be read, lines and a page, and read it back."""
