"""Token sequences as prefix trees: layouts, packs, and attention over them; modules know no models."""
