"""Make the model and the word problems that come with the program; training another model reads nothing here."""
