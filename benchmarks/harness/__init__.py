"""Time contenders, count their work, keep results and draw them."""
