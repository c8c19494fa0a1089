"""Race this library against what users would run instead."""
