"""How the embedded model of the demo was made, from random weights and a careless pupil's solutions."""
